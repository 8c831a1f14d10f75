"""The sums of one optimiser step, added up over micro-batches and ranks, and the train/ values they come to.

Every value is carried as a weighted sum with the sum of its weights and divided once. Pure but for the tensor it holds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from furlong import records

WEIGHTED = ("loss", "pg_loss", "pg_clipfrac", "pg_clipfrac_dual", "ppo_kl", "kl_loss", "entropy_loss")
"""Averaged over the trained tokens of the step."""
MISMATCH = ("train_rollout_logprob_abs_diff", "train_rollout_kl")
"""Averaged over the trained tokens that have an engine log-prob."""
PLAIN = ("ratio", "ratio_squared")
"""Summed over trained tokens, for the effective sample size."""
ORDER = (*WEIGHTED, *MISMATCH, *PLAIN)


@dataclass(frozen=True)
class Normalisers:
    """What the sums of a step are divided by, over all ranks; known before the first forward pass."""

    weight: float
    """Sequences with a trained token, or trained tokens, by how the loss is averaged."""
    mismatch_weight: float
    """The same over tokens that have an engine log-prob."""
    num_tokens: int
    """Trained tokens."""


@dataclass(frozen=True)
class StepOptions:
    """Which optional values exist."""

    use_kl_loss: bool
    dual_clip: bool


class StepSums:
    """Running sums of a step, float64."""

    def __init__(self) -> None:
        self._sums = torch.zeros(len(ORDER), dtype=torch.float64)

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add one micro-batch's scalars; a name that is missing adds nothing."""
        zero = torch.zeros(())
        self._sums += torch.stack([sums.get(name, zero).detach().double().cpu() for name in ORDER])

    def reduce(self, all_reduce: Callable[[torch.Tensor], None]) -> dict[str, float]:
        """The sums over all ranks."""
        all_reduce(self._sums)
        return dict(zip(ORDER, self._sums.tolist(), strict=True))


def values_of(sums: Mapping[str, float], normalisers: Normalisers, options: StepOptions) -> dict[str, records.Value]:
    """The train/ values that follow from the sums of a step."""
    left_out = {"kl_loss": not options.use_kl_loss, "pg_clipfrac_dual": not options.dual_clip}
    values: dict[str, records.Value] = {
        f"train/{name}": records.Mean(sums[name], normalisers.weight)
        for name in WEIGHTED
        if not left_out.get(name, False)
    }
    if normalisers.mismatch_weight > 0:
        values |= {f"train/{name}": records.Mean(sums[name], normalisers.mismatch_weight) for name in MISMATCH}
    if normalisers.num_tokens > 0 and sums["ratio_squared"] != 0:
        ratio = sums["ratio"] ** 2 / (normalisers.num_tokens * sums["ratio_squared"])
        values["train/ess_ratio"] = records.Last(ratio)
    values["train/num_tokens"] = records.Sum(normalisers.num_tokens)
    return values
