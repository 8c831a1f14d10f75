"""Brings the trainer's weights to the engines: gathered bucket by bucket, broadcast, verified, versioned.

Owns the process group with the engines and what is done when an update fails: it is aborted, tried once more over a new
group, then given up. Never sends a weight that is not finite, and never waits without a limit.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import grpc
import structlog
import torch
from torch.distributed import TCPStore

from furlong.checksum import tensor_checksum
from furlong.config import RunConfig
from furlong.v1 import rollout_pb2, weights_pb2
from services.trainer.backend import Backend, TensorLayout
from services.trainer.buckets import describe, flatten, make_buckets
from services.trainer.rollout_client import RolloutClient
from services.trainer.weight_group import GroupFailed, WeightGroup

log = structlog.get_logger()

GRACE_S = 1.0
"""What a call may take beyond the limit of the step it starts, so that the callee's own message arrives."""


class WeightSyncError(Exception):
    """The engines could not be given the weights; the text names the step and the reason."""


@dataclass(frozen=True)
class Published:
    """A finished update."""

    seconds: float
    """From the first call until the engines served the new version."""
    size_bytes: int
    """Bytes of one copy of the model."""
    num_engines: int
    verification: str


class Publisher:
    """The weights' way to the engines of one rollout service after another."""

    def __init__(self, config: RunConfig, backend: Backend, *, device_type: str) -> None:
        self._config = config
        self._backend = backend
        self._transport = "nccl" if device_type == "cuda" and config.rollout.rollout_engine != "cpu" else "gloo"
        self._buckets = make_buckets(backend.layouts(), size_bytes=config.trainer.update_weight_buffer_size)
        self._described = describe(self._buckets)
        self._timeout_s = config.trainer.update_weight_timeout_s
        self._group: WeightGroup | None = None
        self._store: TCPStore | None = None
        self._incarnation = ""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self.forget_group()

    def forget_group(self) -> None:
        """The next update makes a group of its own: the engines or the rollout service are others, or it failed."""
        if self._group is not None:
            self._group.drop()
        self._group = None
        self._store = None
        self._incarnation = uuid.uuid4().hex

    def publish(self, client: RolloutClient, version: int) -> Published:
        """Give every engine the weights as `version`. Raises WeightSyncError, or RpcError when rollout is away."""
        if not self._backend.weights_are_finite():
            raise WeightSyncError(f"version {version}: a weight is not finite; nothing was sent to the engines")
        for last in (False, True):
            started = time.monotonic()
            try:
                commit = self._attempt(client, version)
            except (grpc.RpcError, GroupFailed) as error:
                self._give_up(client, error)
                if last or _code(error) in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                    self._raise(version, error)
                log.warning("weight_update_failed", version=version, reason=_words(error), next="one more try")
            else:
                size = sum(tensor.size_bytes for bucket in self._buckets for tensor in bucket)
                return Published(time.monotonic() - started, size, len(commit.engines), commit.verification)
        raise AssertionError("unreachable")

    def _attempt(self, client: RolloutClient, version: int) -> rollout_pb2.CommitWeightUpdateResponse:
        store = self._open_store()
        begin = client.stub.BeginWeightUpdate(
            rollout_pb2.BeginWeightUpdateRequest(
                policy_version=version,
                mode=weights_pb2.TRANSFER_MODE_BROADCAST,
                buckets=self._described,
                master_address=self._config.run.host.strip("[]"),
                master_port=store.port,
                backend=self._transport,
                trainer_incarnation=self._incarnation,
                timeout_s=self._timeout_s,
            ),
            timeout=self._timeout_s + GRACE_S,
        )
        if begin.group_is_new or self._group is None or self._group.name != begin.group_name:
            self._join(client, begin, store)
        digests: list[Future[list[weights_pb2.TensorChecksum]]] = []
        for index, bucket in enumerate(self._buckets):
            digests.append(self._send(client, begin.update_id, index, bucket))
        request = rollout_pb2.CommitWeightUpdateRequest(
            update_id=begin.update_id,
            policy_version=version,
            checksums=[checksum for digest in digests for checksum in digest.result(self._timeout_s)],
        )
        return client.stub.CommitWeightUpdate(request, timeout=self._timeout_s + GRACE_S)

    def _open_store(self) -> TCPStore:
        if self._store is None:
            limit = timedelta(seconds=self._timeout_s)
            host = self._config.run.host.strip("[]")
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        return self._store

    def _join(self, client: RolloutClient, begin: rollout_pb2.BeginWeightUpdateResponse, store: TCPStore) -> None:
        if self._group is not None:
            self._group.drop()
            self._group = None
        request = rollout_pb2.JoinWeightGroupRequest(update_id=begin.update_id)
        call = client.stub.JoinWeightGroup.future(request, timeout=self._timeout_s + GRACE_S)
        self._group = WeightGroup.join(
            store,
            name=begin.group_name,
            world_size=begin.world_size,
            backend=self._transport,
            timeout_s=self._timeout_s,
            check=_raises_when_failed(call),
        )
        call.result()

    def _send(
        self, client: RolloutClient, update_id: str, index: int, bucket: Sequence[TensorLayout]
    ) -> Future[list[weights_pb2.TensorChecksum]]:
        """Broadcast one bucket while the engines receive it; the checksums, which are computed beside it."""
        assert self._group is not None
        tensors = self._backend.gather([tensor.name for tensor in bucket])
        digests = self._pool.submit(_checksums, bucket, tensors)
        request = rollout_pb2.ReceiveBucketRequest(update_id=update_id, bucket_index=index)
        call = client.stub.ReceiveBucket.future(request, timeout=self._timeout_s + GRACE_S)
        flat = flatten(tensors)
        if self._transport == "nccl":
            flat = flat.cuda()
        self._group.broadcast(flat, check=_raises_when_failed(call))
        call.result()
        return digests

    def _give_up(self, client: RolloutClient, error: Exception) -> None:
        """Close the update on the other side, as far as it can be reached, and forget the group."""
        self.forget_group()
        request = rollout_pb2.AbortWeightUpdateRequest(reason=_words(error))
        try:
            client.stub.AbortWeightUpdate(request, timeout=min(self._timeout_s, 10.0))
        except grpc.RpcError as abort_error:
            log.warning("weight_update_not_aborted", reason=_words(abort_error))

    def _raise(self, version: int, error: Exception) -> None:
        if _code(error) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION):
            raise error  # rollout itself is away, or another process than before: the session restores it
        raise WeightSyncError(
            f"version {version} did not reach the engines: {_words(error)}. "
            f"Each step may take {self._timeout_s:g} s (--update-weight-timeout-s)."
        ) from error


def _raises_when_failed(call: grpc.Future) -> Callable[[], None]:
    """Raises the call's error as soon as there is one, so that no collective waits for a callee that gave up."""

    def check() -> None:
        if call.done() and (error := call.exception()) is not None:
            raise error

    return check


def _checksums(bucket: Sequence[TensorLayout], tensors: Sequence[torch.Tensor]) -> list[weights_pb2.TensorChecksum]:
    return [
        weights_pb2.TensorChecksum(name=layout.name, digest=tensor_checksum(tensor))
        for layout, tensor in zip(bucket, tensors, strict=True)
    ]


def _code(error: Exception) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None


def _words(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
