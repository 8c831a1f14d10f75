"""FSDP2: how a policy is spread over the ranks. The only file that knows torch.distributed.fsdp.

Gradients are summed over the ranks, not averaged: the loss is divided by what all ranks hold together.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.trainer.policy import Policy, decoder_layers


def shard(policy: Policy, *, device: torch.device, world_size: int, dtype: torch.dtype) -> DeviceMesh:
    """Shard a policy in place, layer by layer; it computes in dtype and keeps float32 masters."""
    mesh = init_device_mesh(device.type, (world_size,))
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(policy.lm):
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    # By default the root keeps what it gathered: after a scoring pass before the optimiser's step, the next forward
    # pass would still see the embedding and the norm of before it.
    fully_shard(policy, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return mesh


def like(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, laid out as the parameter is. No communication: each rank holds it all."""
    if not isinstance(parameter, DTensor):
        return full.to(parameter.device, parameter.dtype, copy=True)
    placed: Any = distribute_tensor(
        full.to(parameter.device, parameter.dtype),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )
    return placed


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy_into(parameter: nn.Parameter, full: torch.Tensor) -> None:
    """Set a parameter to a whole tensor that every rank holds."""
    with torch.no_grad():
        local(parameter).copy_(local(like(parameter, full)))
