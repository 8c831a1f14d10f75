from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetTrainerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTrainerStatusResponse(_message.Message):
    __slots__ = ("rollout_id", "num_rollout", "policy_version", "train_step", "phase", "phase_seconds", "checkpoint_rollout_id", "world_size")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    rollout_id: int
    num_rollout: int
    policy_version: int
    train_step: int
    phase: str
    phase_seconds: float
    checkpoint_rollout_id: int
    world_size: int
    def __init__(self, rollout_id: _Optional[int] = ..., num_rollout: _Optional[int] = ..., policy_version: _Optional[int] = ..., train_step: _Optional[int] = ..., phase: _Optional[str] = ..., phase_seconds: _Optional[float] = ..., checkpoint_rollout_id: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class RequestStopRequest(_message.Message):
    __slots__ = ("reason", "diverged")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    diverged: bool
    def __init__(self, reason: _Optional[str] = ..., diverged: bool = ...) -> None: ...

class RequestStopResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
