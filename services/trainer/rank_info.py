"""What a rank knows of itself and its peers, and the one collective that sums numbers over them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RankInfo:
    """One trainer process among its peers."""

    rank: int
    world_size: int
    device: torch.device

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the ranks, in place. Alone: nothing to do."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
