"""AdamW as the trainer uses it: decay for matrices only, a guarded step, its state as named tensors.

Works on plain tensors and on sharded ones alike. Never takes a step with a gradient that is not finite.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from furlong.config.sections import TrainerSection

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepOutcome:
    """What became of one optimiser step."""

    grad_norm: float
    """Global L2 norm before clipping."""
    clipped: bool
    skipped: bool
    """True: loss or gradient was not finite; weights and optimiser state are as before."""


class AdamW:
    """AdamW with two parameter groups: matrices, which decay, and vectors (norms, biases), which do not."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerSection) -> None:
        self.named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        matrices = [parameter for _, parameter in self.named if parameter.ndim >= 2]
        vectors = [parameter for _, parameter in self.named if parameter.ndim < 2]
        groups: list[dict[str, Any]] = [  # Any: torch's own open dictionaries
            {"params": members, "weight_decay": decay}
            for members, decay in ((matrices, config.weight_decay), (vectors, 0.0))
            if members
        ]
        self._clip_norm = config.clip_grad
        self._torch = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    @property
    def num_groups(self) -> int:
        return len(self._torch.param_groups)

    def step(self, learning_rate: float, *, loss_is_finite: bool) -> StepOutcome:
        """Clip, and step unless something is not finite; the gradient is gone afterwards in any case.

        A parameter without a gradient has a gradient of zero: its moments decay as they would.
        """
        parameters = [parameter for _, parameter in self.named]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = float(whole(norm))
        finite = loss_is_finite and math.isfinite(grad_norm)
        clipped = self._clip_norm > 0 and grad_norm > self._clip_norm
        if finite:
            if clipped:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm)
            for group in self._torch.param_groups:
                group["lr"] = learning_rate
            self._torch.step()
        self._torch.zero_grad(set_to_none=True)
        return StepOutcome(grad_norm, clipped, skipped=not finite)

    def moments(self, parameter: nn.Parameter) -> Sequence[torch.Tensor]:
        """First and second moment of a parameter, laid out as it is; zeros before its first step."""
        state = self._torch.state[parameter]
        return [state[name] if name in state else torch.zeros_like(parameter.detach()) for name in MOMENTS]

    def num_steps(self) -> int:
        """Steps taken: AdamW's bias correction goes by it."""
        for _, parameter in self.named:
            state = self._torch.state[parameter]
            return int(state["step"]) if "step" in state else 0
        return 0

    def restore(self, moments: dict[str, Sequence[torch.Tensor]], *, num_steps: int) -> None:
        """Take the moments over, by parameter name and laid out as the parameters. Each gets a step of its own."""
        for name, parameter in self.named:
            first, second = moments[name]
            self._torch.state[parameter] = {
                "step": torch.tensor(float(num_steps), dtype=torch.float32, device=parameter.device),
                "exp_avg": first,
                "exp_avg_sq": second,
            }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered; any other as it is. Every rank calls it alike."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor
