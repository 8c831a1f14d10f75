"""The rollout/ values that only the trainer knows: advantages, log-probs, staleness. Pure."""

import numpy as np
import torch

from furlong import records
from services.trainer.batch import Batch


def rollout_values(
    batch: Batch, *, log_probs: torch.Tensor, ref_log_probs: torch.Tensor | None
) -> dict[str, records.Value]:
    """Each a masked mean a sequence, then the mean over sequences that have a trained token."""
    values: dict[str, records.Value] = {}
    trained = batch.trained_tokens > 0
    advantages = batch.advantages.double().numpy()[trained]
    # GRPO has neither value function nor discount: the return of each token is its advantage
    for name in ("advantages", "returns"):
        values[f"rollout/{name}"] = records.Mean(float(advantages.sum()), int(trained.sum()))
    values["rollout/log_probs"] = sequence_mean(batch, log_probs, trained)
    if ref_log_probs is not None:
        values["rollout/ref_log_probs"] = sequence_mean(batch, ref_log_probs, trained)
    measured = trained.copy()
    if batch.num_samples:
        measured &= batch.has_rollout_log_probs.numpy()[batch.offsets[:-1]]
    if measured.any():
        values["rollout/rollout_log_probs"] = sequence_mean(batch, batch.rollout_log_probs, measured)
    if batch.stalenesses:
        values["rollout/staleness/mean"] = records.mean_of(batch.stalenesses)
        values["rollout/staleness/max"] = records.Max(max(batch.stalenesses))
    return values


def sequence_mean(batch: Batch, per_token: torch.Tensor, chosen: np.ndarray) -> records.Mean:
    """Masked token mean of each chosen sample, summed, with their number."""
    if not chosen.any():
        return records.Mean(0.0, 0)
    mask = batch.loss_mask.numpy() > 0
    masked = np.where(mask, per_token.detach().double().cpu().numpy(), 0.0)
    sums = np.add.reduceat(masked, batch.offsets[:-1])[chosen]
    return records.Mean(float((sums / batch.trained_tokens[chosen]).sum()), int(chosen.sum()))
