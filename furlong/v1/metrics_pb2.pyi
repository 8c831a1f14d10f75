from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordBatch(_message.Message):
    __slots__ = ("producer", "incarnation", "first_sequence", "records")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    producer: str
    incarnation: int
    first_sequence: int
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, producer: _Optional[str] = ..., incarnation: _Optional[int] = ..., first_sequence: _Optional[int] = ..., records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class IngestAck(_message.Message):
    __slots__ = ("producer", "incarnation", "through_sequence", "num_refused", "first_refusal")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    THROUGH_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    FIRST_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    producer: str
    incarnation: int
    through_sequence: int
    num_refused: int
    first_refusal: str
    def __init__(self, producer: _Optional[str] = ..., incarnation: _Optional[int] = ..., through_sequence: _Optional[int] = ..., num_refused: _Optional[int] = ..., first_refusal: _Optional[str] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("num_rows",)
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    def __init__(self, num_rows: _Optional[int] = ...) -> None: ...

class GetMetricsStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsStatusResponse(_message.Message):
    __slots__ = ("num_records", "num_rows", "num_refused", "sinks", "files", "endpoints", "http", "trouble", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    num_records: int
    num_rows: int
    num_refused: int
    sinks: _containers.RepeatedCompositeFieldContainer[SinkStatus]
    files: _containers.RepeatedCompositeFieldContainer[TailedFile]
    endpoints: _containers.RepeatedCompositeFieldContainer[ScrapedEndpoint]
    http: str
    trouble: str
    counts: _containers.ScalarMap[str, int]
    def __init__(self, num_records: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_refused: _Optional[int] = ..., sinks: _Optional[_Iterable[_Union[SinkStatus, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[TailedFile, _Mapping]]] = ..., endpoints: _Optional[_Iterable[_Union[ScrapedEndpoint, _Mapping]]] = ..., http: _Optional[str] = ..., trouble: _Optional[str] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TailedFile(_message.Message):
    __slots__ = ("path", "behind_bytes", "num_lines", "size_bytes", "num_records", "num_clipped", "num_invalid", "num_welded", "num_partial", "num_truncations")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BEHIND_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LINES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CLIPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_INVALID_FIELD_NUMBER: _ClassVar[int]
    NUM_WELDED_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    NUM_TRUNCATIONS_FIELD_NUMBER: _ClassVar[int]
    path: str
    behind_bytes: int
    num_lines: int
    size_bytes: int
    num_records: int
    num_clipped: int
    num_invalid: int
    num_welded: int
    num_partial: int
    num_truncations: int
    def __init__(self, path: _Optional[str] = ..., behind_bytes: _Optional[int] = ..., num_lines: _Optional[int] = ..., size_bytes: _Optional[int] = ..., num_records: _Optional[int] = ..., num_clipped: _Optional[int] = ..., num_invalid: _Optional[int] = ..., num_welded: _Optional[int] = ..., num_partial: _Optional[int] = ..., num_truncations: _Optional[int] = ...) -> None: ...

class ScrapedEndpoint(_message.Message):
    __slots__ = ("instance", "url", "num_readings", "num_failures", "last_error")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    NUM_READINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    instance: str
    url: str
    num_readings: int
    num_failures: int
    last_error: str
    def __init__(self, instance: _Optional[str] = ..., url: _Optional[str] = ..., num_readings: _Optional[int] = ..., num_failures: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

class SinkStatus(_message.Message):
    __slots__ = ("name", "state", "num_rows_behind", "last_error", "seconds_behind", "num_rows_refused", "num_values_left_out")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_VALUES_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    num_rows_behind: int
    last_error: str
    seconds_behind: float
    num_rows_refused: int
    num_values_left_out: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., num_rows_behind: _Optional[int] = ..., last_error: _Optional[str] = ..., seconds_behind: _Optional[float] = ..., num_rows_refused: _Optional[int] = ..., num_values_left_out: _Optional[int] = ...) -> None: ...

class WatchAlertsRequest(_message.Message):
    __slots__ = ("run", "after_id", "attempt", "halt_on")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AFTER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HALT_ON_FIELD_NUMBER: _ClassVar[int]
    run: str
    after_id: int
    attempt: int
    halt_on: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., after_id: _Optional[int] = ..., attempt: _Optional[int] = ..., halt_on: _Optional[_Iterable[str]] = ...) -> None: ...

class Alert(_message.Message):
    __slots__ = ("id", "run", "rule", "state", "severity", "axis", "step", "summary", "remedy", "evidence", "at_us", "halt", "attempt", "diverged")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Alert.State]
        FIRING: _ClassVar[Alert.State]
        RESOLVED: _ClassVar[Alert.State]
    STATE_UNSPECIFIED: Alert.State
    FIRING: Alert.State
    RESOLVED: Alert.State
    ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    AT_US_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_FIELD_NUMBER: _ClassVar[int]
    id: int
    run: str
    rule: str
    state: Alert.State
    severity: str
    axis: str
    step: int
    summary: str
    remedy: str
    evidence: str
    at_us: int
    halt: bool
    attempt: int
    diverged: bool
    def __init__(self, id: _Optional[int] = ..., run: _Optional[str] = ..., rule: _Optional[str] = ..., state: _Optional[_Union[Alert.State, str]] = ..., severity: _Optional[str] = ..., axis: _Optional[str] = ..., step: _Optional[int] = ..., summary: _Optional[str] = ..., remedy: _Optional[str] = ..., evidence: _Optional[str] = ..., at_us: _Optional[int] = ..., halt: bool = ..., attempt: _Optional[int] = ..., diverged: bool = ...) -> None: ...
