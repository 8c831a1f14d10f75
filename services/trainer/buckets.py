"""How the model's tensors are cut into buckets for the wire, and one bucket's bytes. Pure."""

from collections.abc import Sequence

import torch

from furlong.v1 import weights_pb2
from services.trainer.backend import TensorLayout


def make_buckets(layouts: Sequence[TensorLayout], *, size_bytes: int) -> list[list[TensorLayout]]:
    """Tensors in their order, in buckets of at most size_bytes; a larger tensor is a bucket of its own."""
    buckets: list[list[TensorLayout]] = []
    filled = 0
    for tensor in layouts:
        if buckets and filled + tensor.size_bytes <= size_bytes:
            buckets[-1].append(tensor)
            filled += tensor.size_bytes
        else:
            buckets.append([tensor])
            filled = tensor.size_bytes
    return buckets


def describe(buckets: Sequence[Sequence[TensorLayout]]) -> list[weights_pb2.Bucket]:
    """The buckets as the contract words them."""
    return [
        weights_pb2.Bucket(
            index=index,
            tensors=[
                weights_pb2.TensorSpec(
                    name=tensor.name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tensor.shape,
                    size_bytes=tensor.size_bytes,
                )
                for tensor in bucket
            ],
        )
        for index, bucket in enumerate(buckets)
    ]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors' bytes one after another, without padding. [byte], uint8."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
