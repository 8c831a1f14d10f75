from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_MODE_UNSPECIFIED: _ClassVar[TransferMode]
    TRANSFER_MODE_BROADCAST: _ClassVar[TransferMode]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_STARTING: _ClassVar[EngineState]
    ENGINE_STATE_WAITING_FOR_WEIGHTS: _ClassVar[EngineState]
    ENGINE_STATE_UPDATING: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_GONE: _ClassVar[EngineState]
TRANSFER_MODE_UNSPECIFIED: TransferMode
TRANSFER_MODE_BROADCAST: TransferMode
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_STARTING: EngineState
ENGINE_STATE_WAITING_FOR_WEIGHTS: EngineState
ENGINE_STATE_UPDATING: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_GONE: EngineState

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    size_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("index", "tensors")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    index: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, index: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class TensorChecksum(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("engine_id", "url", "state", "policy_version", "group_rank", "pid")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    url: str
    state: EngineState
    policy_version: int
    group_rank: int
    pid: int
    def __init__(self, engine_id: _Optional[str] = ..., url: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., policy_version: _Optional[int] = ..., group_rank: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...
