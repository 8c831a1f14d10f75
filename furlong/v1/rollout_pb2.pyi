from furlong.v1 import sample_pb2 as _sample_pb2
from furlong.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NextBatchRequest(_message.Message):
    __slots__ = ("rollout_id", "policy_version")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    rollout_id: int
    policy_version: int
    def __init__(self, rollout_id: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...

class NextBatchResponse(_message.Message):
    __slots__ = ("group", "summary")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    group: _sample_pb2.Group
    summary: BatchSummary
    def __init__(self, group: _Optional[_Union[_sample_pb2.Group, _Mapping]] = ..., summary: _Optional[_Union[BatchSummary, _Mapping]] = ...) -> None: ...

class BatchSummary(_message.Message):
    __slots__ = ("rollout_id", "num_groups", "num_samples", "reward_sum", "reward_count", "rollout_time_s", "num_response_tokens", "repeated_answer")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REWARD_SUM_FIELD_NUMBER: _ClassVar[int]
    REWARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPEATED_ANSWER_FIELD_NUMBER: _ClassVar[int]
    rollout_id: int
    num_groups: int
    num_samples: int
    reward_sum: float
    reward_count: int
    rollout_time_s: float
    num_response_tokens: int
    repeated_answer: bool
    def __init__(self, rollout_id: _Optional[int] = ..., num_groups: _Optional[int] = ..., num_samples: _Optional[int] = ..., reward_sum: _Optional[float] = ..., reward_count: _Optional[int] = ..., rollout_time_s: _Optional[float] = ..., num_response_tokens: _Optional[int] = ..., repeated_answer: bool = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("rollout_id", "policy_version")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    rollout_id: int
    policy_version: int
    def __init__(self, rollout_id: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("results", "eval_time_s")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    EVAL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[EvaluationResult]
    eval_time_s: float
    def __init__(self, results: _Optional[_Iterable[_Union[EvaluationResult, _Mapping]]] = ..., eval_time_s: _Optional[float] = ...) -> None: ...

class EvaluationResult(_message.Message):
    __slots__ = ("name", "reward_sum", "reward_count", "num_samples")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REWARD_SUM_FIELD_NUMBER: _ClassVar[int]
    REWARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    reward_sum: float
    reward_count: int
    num_samples: int
    def __init__(self, name: _Optional[str] = ..., reward_sum: _Optional[float] = ..., reward_count: _Optional[int] = ..., num_samples: _Optional[int] = ...) -> None: ...

class BeginWeightUpdateRequest(_message.Message):
    __slots__ = ("policy_version", "mode", "buckets", "master_address", "master_port", "backend", "trainer_incarnation", "timeout_s")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TRAINER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    mode: _weights_pb2.TransferMode
    buckets: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Bucket]
    master_address: str
    master_port: int
    backend: str
    trainer_incarnation: str
    timeout_s: float
    def __init__(self, policy_version: _Optional[int] = ..., mode: _Optional[_Union[_weights_pb2.TransferMode, str]] = ..., buckets: _Optional[_Iterable[_Union[_weights_pb2.Bucket, _Mapping]]] = ..., master_address: _Optional[str] = ..., master_port: _Optional[int] = ..., backend: _Optional[str] = ..., trainer_incarnation: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class BeginWeightUpdateResponse(_message.Message):
    __slots__ = ("update_id", "group_name", "world_size", "group_is_new", "engines")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_IS_NEW_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    group_name: str
    world_size: int
    group_is_new: bool
    engines: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Engine]
    def __init__(self, update_id: _Optional[str] = ..., group_name: _Optional[str] = ..., world_size: _Optional[int] = ..., group_is_new: bool = ..., engines: _Optional[_Iterable[_Union[_weights_pb2.Engine, _Mapping]]] = ...) -> None: ...

class JoinWeightGroupRequest(_message.Message):
    __slots__ = ("update_id",)
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    def __init__(self, update_id: _Optional[str] = ...) -> None: ...

class JoinWeightGroupResponse(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class ReceiveBucketRequest(_message.Message):
    __slots__ = ("update_id", "bucket_index")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    BUCKET_INDEX_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    bucket_index: int
    def __init__(self, update_id: _Optional[str] = ..., bucket_index: _Optional[int] = ...) -> None: ...

class ReceiveBucketResponse(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class CommitWeightUpdateRequest(_message.Message):
    __slots__ = ("update_id", "policy_version", "checksums")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    policy_version: int
    checksums: _containers.RepeatedCompositeFieldContainer[_weights_pb2.TensorChecksum]
    def __init__(self, update_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., checksums: _Optional[_Iterable[_Union[_weights_pb2.TensorChecksum, _Mapping]]] = ...) -> None: ...

class CommitWeightUpdateResponse(_message.Message):
    __slots__ = ("engines", "seconds", "verification")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Engine]
    seconds: float
    verification: str
    def __init__(self, engines: _Optional[_Iterable[_Union[_weights_pb2.Engine, _Mapping]]] = ..., seconds: _Optional[float] = ..., verification: _Optional[str] = ...) -> None: ...

class AbortWeightUpdateRequest(_message.Message):
    __slots__ = ("update_id", "reason")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    reason: str
    def __init__(self, update_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortWeightUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveStateRequest(_message.Message):
    __slots__ = ("rollout_id",)
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    rollout_id: int
    def __init__(self, rollout_id: _Optional[int] = ...) -> None: ...

class SaveStateResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: bytes
    def __init__(self, state: _Optional[bytes] = ...) -> None: ...

class RestoreStateRequest(_message.Message):
    __slots__ = ("state", "next_rollout_id", "attempt")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    state: bytes
    next_rollout_id: int
    attempt: int
    def __init__(self, state: _Optional[bytes] = ..., next_rollout_id: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class RestoreStateResponse(_message.Message):
    __slots__ = ("warnings", "num_groups_drawn")
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_DRAWN_FIELD_NUMBER: _ClassVar[int]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    num_groups_drawn: int
    def __init__(self, warnings: _Optional[_Iterable[str]] = ..., num_groups_drawn: _Optional[int] = ...) -> None: ...

class CommitCheckpointRequest(_message.Message):
    __slots__ = ("rollout_id",)
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    rollout_id: int
    def __init__(self, rollout_id: _Optional[int] = ...) -> None: ...

class CommitCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRolloutStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRolloutStatusResponse(_message.Message):
    __slots__ = ("rollout_id", "policy_version", "engines", "num_groups_drawn", "phase")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_DRAWN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    rollout_id: int
    policy_version: int
    engines: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Engine]
    num_groups_drawn: int
    phase: str
    def __init__(self, rollout_id: _Optional[int] = ..., policy_version: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[_weights_pb2.Engine, _Mapping]]] = ..., num_groups_drawn: _Optional[int] = ..., phase: _Optional[str] = ...) -> None: ...
