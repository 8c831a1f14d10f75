from google.protobuf.internal import containers as _containers
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
    __slots__ = ("num_records", "num_rows", "num_refused", "sinks")
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    num_records: int
    num_rows: int
    num_refused: int
    sinks: _containers.RepeatedCompositeFieldContainer[SinkStatus]
    def __init__(self, num_records: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_refused: _Optional[int] = ..., sinks: _Optional[_Iterable[_Union[SinkStatus, _Mapping]]] = ...) -> None: ...

class SinkStatus(_message.Message):
    __slots__ = ("name", "state", "num_rows_behind", "last_error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    num_rows_behind: int
    last_error: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., num_rows_behind: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...
