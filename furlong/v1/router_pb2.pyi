from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_JOINING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_UNREADY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_JOINING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_UNREADY: WorkerState
WORKER_STATE_DRAINING: WorkerState

class Worker(_message.Message):
    __slots__ = ("worker_id", "url", "state", "policy_version", "num_in_flight", "num_requests", "num_failures", "last_error", "labels", "priority", "worker_type", "breaker")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WORKER_TYPE_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    url: str
    state: WorkerState
    policy_version: int
    num_in_flight: int
    num_requests: int
    num_failures: int
    last_error: str
    labels: _containers.ScalarMap[str, str]
    priority: int
    worker_type: str
    breaker: str
    def __init__(self, worker_id: _Optional[str] = ..., url: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., policy_version: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_failures: _Optional[int] = ..., last_error: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., worker_type: _Optional[str] = ..., breaker: _Optional[str] = ...) -> None: ...

class AddWorkerRequest(_message.Message):
    __slots__ = ("url", "admit_without_policy_version", "labels", "priority", "worker_type", "api_key")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    URL_FIELD_NUMBER: _ClassVar[int]
    ADMIT_WITHOUT_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WORKER_TYPE_FIELD_NUMBER: _ClassVar[int]
    API_KEY_FIELD_NUMBER: _ClassVar[int]
    url: str
    admit_without_policy_version: bool
    labels: _containers.ScalarMap[str, str]
    priority: int
    worker_type: str
    api_key: str
    def __init__(self, url: _Optional[str] = ..., admit_without_policy_version: bool = ..., labels: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., worker_type: _Optional[str] = ..., api_key: _Optional[str] = ...) -> None: ...

class AddWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class RemoveWorkerRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class RemoveWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class SetWorkerStateRequest(_message.Message):
    __slots__ = ("worker", "admit", "policy_version")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    admit: bool
    policy_version: int
    def __init__(self, worker: _Optional[str] = ..., admit: bool = ..., policy_version: _Optional[int] = ...) -> None: ...

class SetWorkerStateResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class WatchWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
