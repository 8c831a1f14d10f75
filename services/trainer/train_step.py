"""One optimiser step over micro-batches: forward, loss, backward, sums. Knows no sharding and no service.

The loss of every micro-batch is divided by the normaliser of the whole step, so that gradients and values do not depend
on how the step was cut. Samples whose gradient is exactly zero are only scored, never differentiated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from furlong.config.sections import TrainerSection
from services.trainer.batch import Batch
from services.trainer.kl import kl_estimate
from services.trainer.layout import MicroBatch
from services.trainer.losses import policy_terms, token_weights, weighted_sum
from services.trainer.policy import Policy
from services.trainer.step_sums import Normalisers, StepSums


@dataclass(frozen=True)
class StepInputs:
    """What every micro-batch of a step needs of the whole batch, on the device. All [response token]."""

    weights: torch.Tensor
    """How much each token counts in the averages of its step; 0 = not trained."""
    advantages: torch.Tensor
    rollout_log_probs: torch.Tensor
    has_rollout_log_probs: torch.Tensor
    old_log_probs: torch.Tensor | None
    """lp_old. None: the policy has not moved since, so that it is lp_new itself."""
    start_log_probs: torch.Tensor | None
    """The trainer's own log-probs under the weights that sampled. None: lp_new itself."""
    ref_log_probs: torch.Tensor | None


def make_inputs(
    batch: Batch,
    config: TrainerSection,
    *,
    start_log_probs: torch.Tensor | None,
    ref_log_probs: torch.Tensor | None,
    device: torch.device,
) -> StepInputs:
    """The per-token inputs of a rollout's steps."""
    lengths = torch.tensor([len(response) for response in batch.responses], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(batch.num_samples), lengths)
    weights = token_weights(
        batch.loss_mask, owner, num_sequences=batch.num_samples, per_token=config.calculate_per_token_loss
    )
    engine = batch.rollout_log_probs.to(device)
    return StepInputs(
        weights=weights.to(device),
        advantages=batch.advantages[owner].to(device),
        rollout_log_probs=engine,
        has_rollout_log_probs=batch.has_rollout_log_probs.to(device),
        old_log_probs=engine if config.use_rollout_logprobs else start_log_probs,
        start_log_probs=start_log_probs,
        ref_log_probs=ref_log_probs,
    )


def normalisers_of(batch: Batch, step: int, *, per_token: bool) -> Normalisers:
    """What the sums of a step are divided by, from the whole batch. Every rank computes the same."""
    trained = batch.trained_tokens * (np.array(batch.steps, dtype=np.int64) == step)
    counted = trained if per_token else trained > 0
    measured = batch.has_rollout_log_probs.numpy()[batch.offsets[:-1]]
    return Normalisers(float(counted.sum()), float((counted * measured).sum()), int(trained.sum()))


def split_by_gradient(batch: Batch, step: int, config: TrainerSection) -> tuple[list[int], list[int]]:
    """(samples to differentiate, samples only to score) of a step; samples without a trained token are in neither.

    An advantage of 0 gives the policy loss a gradient of exactly 0; only a KL or entropy term makes one beside it.
    """
    trained = batch.trained_tokens
    members = [sample for sample in range(batch.num_samples) if batch.steps[sample] == step and trained[sample] > 0]
    if (config.use_kl_loss and config.kl_loss_coef != 0) or config.entropy_coef != 0:
        return members, []
    still = (batch.advantages == 0).tolist()
    return [sample for sample in members if not still[sample]], [sample for sample in members if still[sample]]


def run_micro_batches(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    inputs: StepInputs,
    config: TrainerSection,
    *,
    normaliser: float,
    differentiate: bool,
    sums: StepSums,
    keep_log_probs: Callable[[MicroBatch, torch.Tensor], None],
) -> None:
    """Forward, and backward if differentiate, of each micro-batch; adds to the sums and hands lp_new on."""
    for micro_batch in micro_batches:
        with torch.set_grad_enabled(differentiate):
            log_probs, entropy = policy(micro_batch)
            if micro_batch.is_filler:
                loss = torch.nan_to_num(log_probs).sum() * 0.0
            else:
                parts = loss_parts(log_probs, entropy, micro_batch, inputs, config)
                sums.add(parts)
                keep_log_probs(micro_batch, log_probs.detach())
                loss = parts["loss"] / normaliser
        if differentiate:
            loss.backward()


def loss_parts(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    micro_batch: MicroBatch,
    inputs: StepInputs,
    config: TrainerSection,
) -> dict[str, torch.Tensor]:
    """The weighted sums of one micro-batch by the names of step_sums.ORDER; `loss` is differentiable."""
    at = micro_batch.token_indices
    weights, advantages = inputs.weights[at], inputs.advantages[at]
    old = log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs[at]
    terms = policy_terms(
        log_probs,
        old,
        advantages,
        eps_clip=config.eps_clip,
        eps_clip_high=config.eps_clip if config.eps_clip_high is None else config.eps_clip_high,
        eps_clip_c=config.eps_clip_c,
    )
    parts = {
        "pg_loss": weighted_sum(terms.loss, weights),
        "pg_clipfrac": weighted_sum(terms.clipped, weights),
        "pg_clipfrac_dual": weighted_sum(terms.dual_clipped, weights),
        "ppo_kl": weighted_sum(old - log_probs.detach(), weights),
        "entropy_loss": weighted_sum(entropy, weights),
    }
    counts = (weights > 0).to(terms.ratio.dtype)
    parts["ratio"] = weighted_sum(terms.ratio, counts)
    parts["ratio_squared"] = weighted_sum(terms.ratio.square(), counts)
    loss = parts["pg_loss"]
    if config.entropy_coef != 0:
        loss = loss - config.entropy_coef * parts["entropy_loss"]
    if inputs.ref_log_probs is not None:
        kl = kl_estimate(log_probs, inputs.ref_log_probs[at], kind=config.kl_loss_type)
        parts["kl_loss"] = weighted_sum(kl, weights)
        if config.kl_loss_coef != 0:
            loss = loss + config.kl_loss_coef * parts["kl_loss"]
    start = log_probs.detach() if inputs.start_log_probs is None else inputs.start_log_probs[at]
    engine = inputs.rollout_log_probs[at]
    measured = weights * inputs.has_rollout_log_probs[at]
    parts["train_rollout_logprob_abs_diff"] = weighted_sum((start - engine).abs(), measured)
    parts["train_rollout_kl"] = weighted_sum(kl_estimate(start, engine, kind="k3"), measured)
    return {"loss": loss, **parts}
