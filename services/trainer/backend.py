"""What a training engine must offer, and what it answers. The loop sees this Protocol alone.

A method is called on rank 0 by the loop and on every other rank by `ranks.follow`: the same calls, in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from furlong import records
from services.trainer.batch import Batch


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of the model as it is published."""

    name: str
    """Its Hugging Face name."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class StepResult:
    """One optimiser step."""

    values: Mapping[str, records.Value]
    """The train/ values."""
    skipped: bool
    num_tokens: int


@dataclass(frozen=True)
class TrainResult:
    """What training one rollout did."""

    steps: Sequence[StepResult]
    rollout_values: Mapping[str, records.Value]
    """rollout/log_probs and what else only the trainer knows of the rollout."""
    train_time_s: float
    log_probs_time_s: float | None
    """Seconds to score the rollout before its first step. None: that was not needed."""
    ref_log_probs_time_s: float | None
    num_model_tokens: int
    """Prompt and response tokens of the trained samples."""
    model_flops: float
    """Floating-point operations that training these samples takes by the model's sizes."""


@dataclass(frozen=True)
class TrainerState:
    """Everything of the trainer that a checkpoint holds, gathered."""

    tensors: Mapping[str, torch.Tensor]
    """Master weights under their Hugging Face names, float32."""
    moments: Mapping[str, torch.Tensor]
    """Optimiser moments: NAME.exp_avg and NAME.exp_avg_sq."""
    optimizer_steps: int
    """Steps that the optimiser has taken."""
    rng: torch.Tensor
    """State of torch's generator on rank 0."""
    train_step: int
    """Optimiser steps finished since the start of the run, skipped ones too."""
    skipped_steps: int
    extra: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """A training engine."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def train_step(self) -> int:
        """Optimiser steps finished since the start of the run."""
        ...

    @property
    def skipped_steps(self) -> int: ...

    @property
    def peak_flops(self) -> float | None:
        """Peak of one device. None: not known."""
        ...

    def layouts(self) -> Sequence[TensorLayout]:
        """Every tensor of the model, tied ones once, in a fixed order. No collective."""
        ...

    def train(self, batch: Batch) -> TrainResult:
        """Train one rollout: as many optimiser steps as the batch says."""
        ...

    def weights_are_finite(self) -> bool:
        """Whether every weight on every rank is a finite number."""
        ...

    def gather(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Whole tensors on the CPU, in the published dtype, on rank 0; nothing elsewhere."""
        ...

    def state(self) -> TrainerState | None:
        """The trainer's state on rank 0; None elsewhere."""
        ...

    def restore(self, folder: str) -> None:
        """Go back to the state in a checkpoint folder, which every rank can read."""
        ...
