"""Estimators of KL(policy, other) from the log-probs of sampled tokens. Pure functions on tensors.

Source: J. Schulman, "Approximating KL divergence" (2020): k1, k2, k3, with d = lp - lp_other.
"""

import torch

EXP_LIMIT = 20.0
"""Where exp(-d) goes over into its tangent: e^20 is far beyond any sound ratio, and float32 ends at e^88."""

LOW_VAR_LIMIT = 10.0
"""Bound of low_var_kl."""


def kl_estimate(log_probs: torch.Tensor, other: torch.Tensor, *, kind: str) -> torch.Tensor:
    """The estimate a token, any shape, nats; differentiable in log_probs.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; low_var_kl = k3 bounded to [-10, 10].
    """
    difference = log_probs - other
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        return k3(difference)
    if kind == "low_var_kl":
        return k3(difference).clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
    raise ValueError(f"kl_loss_type must be k1, k2, k3 or low_var_kl, got {kind!r}")


def k3(difference: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d, never negative, with a finite gradient for every finite d.

    expm1 keeps tiny d from coming out below 0. Beyond -d = 20 the exponential goes on as its tangent, so that value and
    gradient stay finite in float32 and keep their sign.
    """
    exponent = -difference
    bounded = exponent.clamp(max=EXP_LIMIT)
    beyond = (exponent - EXP_LIMIT).clamp(min=0)
    slope = torch.exp(torch.tensor(EXP_LIMIT, dtype=difference.dtype, device=difference.device))
    return torch.expm1(bounded) + beyond * slope + difference
