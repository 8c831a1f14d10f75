"""What a trainer does in a weight update, with real bytes over gloo; blocking, so run it on a thread."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from furlong import rpc
from furlong.checksum import tensor_checksum
from furlong.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2
from services.trainer.weight_group import WeightGroup

TIMEOUT_S = 20.0


def weights_of(folder: Path, *, noise: float = 0.0) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, some noise added, always the same."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    return {
        name: tensor + (noise * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


class TrainerSide:
    """One trainer process's end."""

    def __init__(self, address: str, *, incarnation: str = "one", timeout_s: float = TIMEOUT_S) -> None:
        self._channel = rpc.channel(address)
        self.stub = rollout_pb2_grpc.RolloutStub(self._channel)
        limit = timedelta(seconds=timeout_s)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None

    def begin(
        self, weights: dict[str, torch.Tensor], version: int, *, num_buckets: int = 2
    ) -> rollout_pb2.BeginWeightUpdateResponse:
        """Open an update and stand in the group."""
        request = rollout_pb2.BeginWeightUpdateRequest(
            policy_version=version,
            mode=weights_pb2.TRANSFER_MODE_BROADCAST,
            buckets=[
                weights_pb2.Bucket(index=index, tensors=[_spec(name, weights[name]) for name in names])
                for index, names in enumerate(split(list(weights), num_buckets))
            ],
            master_address="127.0.0.1",
            master_port=self._store.port,
            backend="gloo",
            trainer_incarnation=self._incarnation,
            timeout_s=self._timeout_s,
        )
        begun = self.stub.BeginWeightUpdate(request, timeout=self._timeout_s + 2)
        if begun.group_is_new:
            call = self.stub.JoinWeightGroup.future(
                rollout_pb2.JoinWeightGroupRequest(update_id=begun.update_id), timeout=self._timeout_s + 2
            )
            self._group = WeightGroup.join(
                self._store,
                name=begun.group_name,
                world_size=begun.world_size,
                backend="gloo",
                timeout_s=self._timeout_s,
                check=lambda: _raise_if_failed(call),
            )
            call.result()
        return begun

    def send(self, weights: dict[str, torch.Tensor], update_id: str, index: int, *, num_buckets: int = 2) -> None:
        """Broadcast one bucket."""
        assert self._group is not None
        request = rollout_pb2.ReceiveBucketRequest(update_id=update_id, bucket_index=index)
        call = self.stub.ReceiveBucket.future(request, timeout=self._timeout_s + 2)
        names = split(list(weights), num_buckets)[index]
        flat = torch.cat([weights[name].contiguous().view(-1).view(torch.uint8) for name in names])
        self._group.broadcast(flat, check=lambda: _raise_if_failed(call))
        call.result()

    def commit(
        self, weights: dict[str, torch.Tensor], update_id: str, version: int
    ) -> rollout_pb2.CommitWeightUpdateResponse:
        """Have the weights verified and served."""
        checksums = [
            weights_pb2.TensorChecksum(name=name, digest=tensor_checksum(tensor)) for name, tensor in weights.items()
        ]
        request = rollout_pb2.CommitWeightUpdateRequest(
            update_id=update_id, policy_version=version, checksums=checksums
        )
        return self.stub.CommitWeightUpdate(request, timeout=self._timeout_s + 2)

    def publish(self, weights: dict[str, torch.Tensor], version: int) -> rollout_pb2.CommitWeightUpdateResponse:
        """A whole update."""
        begun = self.begin(weights, version)
        for index in range(2):
            self.send(weights, begun.update_id, index)
        return self.commit(weights, begun.update_id, version)

    def close(self) -> None:
        self._channel.close()


def split(names: list[str], count: int) -> list[list[str]]:
    """Names in order, cut into buckets."""
    size = -(-len(names) // count)
    return [names[start : start + size] for start in range(0, len(names), size)]


def _spec(name: str, tensor: torch.Tensor) -> weights_pb2.TensorSpec:
    return weights_pb2.TensorSpec(
        name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), size_bytes=tensor.nbytes
    )


def _raise_if_failed(call: Any) -> None:  # Any: grpc's future, which its stubs do not name
    if call.done() and (error := call.exception()) is not None:
        assert isinstance(error, grpc.RpcError)
        raise error
