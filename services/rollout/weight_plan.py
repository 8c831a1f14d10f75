"""The rules of a weight update: which call may come when, with what. Pure: speaks to no engine, keeps no time.

A call that breaks a rule raises Refused with the status that the trainer gets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from furlong.v1 import rollout_pb2, weights_pb2
from services.rollout.refusal import Refused

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class Member:
    """One engine in the process group."""

    engine_id: str
    incarnation: int


@dataclass(frozen=True)
class GroupKey:
    """What a process group was made for; a change of any part means a new group."""

    members: tuple[Member, ...]
    trainer_incarnation: str
    master_address: str
    master_port: int
    backend: str


@dataclass(frozen=True)
class BucketCall:
    """What engines are told to receive one bucket."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_last: bool


@dataclass
class UpdatePlan:
    """One update from Begin to Commit or Abort, and where it is."""

    update_id: str
    request: rollout_pb2.BeginWeightUpdateRequest
    group_is_new: bool
    joined: bool = False
    num_received: int = 0
    closed: str = ""
    """Why it is over: "committed", or the reason it was given up. Empty: it is open."""

    @property
    def policy_version(self) -> int:
        return self.request.policy_version

    @property
    def timeout_s(self) -> float:
        return self.request.timeout_s

    @property
    def tensor_names(self) -> list[str]:
        return [tensor.name for bucket in self.request.buckets for tensor in bucket.tensors]

    def bucket(self, index: int) -> BucketCall:
        """The call of one bucket."""
        tensors = self.request.buckets[index].tensors
        return BucketCall(
            names=tuple(tensor.name for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            is_last=index == len(self.request.buckets) - 1,
        )


def check_begin(request: rollout_pb2.BeginWeightUpdateRequest, *, newest_version: int | None) -> None:
    """newest_version: the newest that was published since the last RestoreState, or where that started.

    Raises Refused.
    """
    if newest_version is not None and request.policy_version < newest_version:
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"policy_version must not go back: {newest_version} was published, got {request.policy_version}. "
            "A trainer that starts from an older checkpoint calls RestoreState first.",
        )
    if request.mode != weights_pb2.TRANSFER_MODE_BROADCAST:
        raise _invalid("mode", weights_pb2.TransferMode.Name(request.mode), "must be TRANSFER_MODE_BROADCAST")
    if request.backend not in BACKENDS:
        raise _invalid("backend", request.backend, f"must be one of {', '.join(BACKENDS)}")
    if not (request.timeout_s > 0 and math.isfinite(request.timeout_s)):
        raise _invalid("timeout_s", request.timeout_s, "must be a positive number of seconds")
    if not request.master_address or not 0 < request.master_port < 65536:
        raise _invalid("master", f"{request.master_address}:{request.master_port}", "must be a host and a port")
    if not request.trainer_incarnation:
        raise _invalid("trainer_incarnation", "", "must not be empty")
    _check_buckets(request.buckets)


def _check_buckets(buckets: Sequence[weights_pb2.Bucket]) -> None:
    if not buckets:
        raise _invalid("buckets", "[]", "must hold every tensor of the model")
    seen: set[str] = set()
    for position, bucket in enumerate(buckets):
        if bucket.index != position:
            raise _invalid(f"buckets[{position}].index", bucket.index, f"must be {position}")
        if not bucket.tensors:
            raise _invalid(f"buckets[{position}].tensors", "[]", "must not be empty")
        for tensor in bucket.tensors:
            if not tensor.name or tensor.name in seen:
                raise _invalid(f"buckets[{position}]", tensor.name, "tensor names must be distinct and not empty")
            seen.add(tensor.name)
            if tensor.dtype not in DTYPE_BYTES:
                raise _invalid(tensor.name, tensor.dtype, f"dtype must be one of {', '.join(DTYPE_BYTES)}")
            size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
            if any(dimension < 0 for dimension in tensor.shape) or size != tensor.size_bytes:
                raise _invalid(tensor.name, tensor.size_bytes, f"size_bytes must be {size} for its shape and dtype")


def check_open(plan: UpdatePlan | None, update_id: str) -> UpdatePlan:
    """The open update that a call names. Raises Refused."""
    if plan is None or plan.update_id != update_id:
        current = f"the open one is {plan.update_id}" if plan and not plan.closed else "none is open"
        raise Refused(grpc.StatusCode.ABORTED, f"weight update {update_id!r} is not open; {current}")
    if plan.closed:
        raise Refused(grpc.StatusCode.ABORTED, f"weight update {update_id} is over: {plan.closed}")
    return plan


def check_join(plan: UpdatePlan) -> None:
    """Joining is for a new group, once."""
    if not plan.group_is_new:
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "the group stands already: Begin said group_is_new=false")
    if plan.joined:
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "the engines have joined the group already")


def check_bucket(plan: UpdatePlan, index: int) -> None:
    """Buckets come in order, each once, after the group stands."""
    if plan.group_is_new and not plan.joined:
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            "there is no process group yet: call JoinWeightGroup before ReceiveBucket",
        )
    if index != plan.num_received or index >= len(plan.request.buckets):
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"bucket_index must be {plan.num_received} of {len(plan.request.buckets)} buckets, got {index}",
        )


def check_commit(plan: UpdatePlan, request: rollout_pb2.CommitWeightUpdateRequest) -> dict[str, str]:
    """The digest of every tensor by name. Raises Refused when something was not sent."""
    if request.policy_version != plan.policy_version:
        raise _invalid("policy_version", request.policy_version, f"must be {plan.policy_version}, as at Begin")
    if plan.num_received != len(plan.request.buckets):
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{plan.num_received} of {len(plan.request.buckets)} buckets were received: nothing can be committed",
        )
    checksums = {item.name: item.digest for item in request.checksums}
    missing = [name for name in plan.tensor_names if not checksums.get(name)]
    extra = sorted(set(checksums) - set(plan.tensor_names))
    if missing or extra:
        raise _invalid(
            "checksums", f"missing {missing[:5]}, unknown {extra[:5]}", "must be one for every tensor of Begin"
        )
    return checksums


def _invalid(key: str, value: object, rule: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{key} = {str(value)[:200]}: {rule}")
