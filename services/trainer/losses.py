"""The policy loss and its averages. Pure functions on tensors; normalisers come from outside, so that neither the
number of micro-batches nor that of ranks can change a number.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PolicyTerms:
    """The policy loss a token, and what clipping did. All of one shape."""

    loss: torch.Tensor
    """Differentiable in the new log-probs."""
    ratio: torch.Tensor
    """exp(lp_new - lp_old), detached."""
    clipped: torch.Tensor
    """1.0 where the clipped term is the larger one."""
    dual_clipped: torch.Tensor
    """1.0 where the dual clip bounds the loss."""


def policy_terms(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> PolicyTerms:
    """max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A) a token, r = exp(lp_new - lp_old).

    Source: PPO (arXiv 1707.06347), eq. 7, with the two clips apart (DAPO, arXiv 2503.14476); the dual clip for A < 0,
    min(loss, -c A), from arXiv 1912.09729, eq. 5. All arguments have one shape.
    """
    difference = log_probs - old_log_probs
    # where the ratio overflows, exp's own gradient is infinite, and times the 0 of a clip or a mask it is NaN
    overflows = torch.exp(difference.detach()).isinf()
    ratio = torch.exp(torch.where(overflows, difference.detach(), difference))
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = (bounded > plain).to(loss.dtype)
    dual = torch.zeros_like(clipped)
    if eps_clip_c is not None:
        bound = -eps_clip_c * advantages
        hit = (advantages < 0) & (loss > bound)
        dual = hit.to(loss.dtype)
        loss = torch.where(hit, bound, loss)
    return PolicyTerms(loss, ratio.detach(), clipped, dual)


def token_weights(
    loss_mask: torch.Tensor, sequence_of_token: torch.Tensor, *, num_sequences: int, per_token: bool
) -> torch.Tensor:
    """How much each token counts in an average: the weighted sum over `normaliser` is the average. [token], float32.

    per_token: each trained token counts 1. Else each trained token counts 1 / trained tokens of its sequence, so that a
    sequence counts 1. A masked token counts 0 and is in no denominator; a sequence without trained tokens counts 0.
    """
    mask = loss_mask.to(torch.float32)
    if per_token:
        return mask
    trained = torch.zeros(num_sequences, dtype=torch.float32, device=mask.device)
    trained = trained.index_add(0, sequence_of_token, mask)
    return mask / trained.clamp(min=1.0)[sequence_of_token]


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of weights x values over tokens that count at all: a masked token's NaN or Infinity does not leak in."""
    return torch.where(weights > 0, values * weights, torch.zeros_like(values)).sum()
