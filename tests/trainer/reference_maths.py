"""GRPO's loss and gradient once more, in float64, written from the formulas and from none of the trainer's code."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from furlong.v1 import sample_pb2


@dataclass(frozen=True)
class Reference:
    """What the step should come to."""

    loss: float
    pg_loss: float
    kl: float
    entropy: float
    abs_diff: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    log_probs: list[list[float]]


def score(lm: Any, sample: sample_pb2.Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) of a response, one sequence at a time, no padding."""
    prompt, response = list(sample.prompt_token_ids), list(sample.response_token_ids)
    logits = lm(input_ids=torch.tensor([prompt + response])).logits[0].double() / temperature
    chosen, entropies = [], []
    for position, token in enumerate(response):
        row = logits[len(prompt) + position - 1]
        log_p = row - torch.logsumexp(row, 0)
        chosen.append(log_p[token])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(chosen), torch.stack(entropies)


def advantages_of(group: sample_pb2.Group) -> list[float]:
    rewards = [sample.reward for sample in group.samples]
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def grpo_step(
    lm: torch.nn.Module,
    groups: Sequence[sample_pb2.Group],
    *,
    temperature: float = 1.0,
    eps_clip: float = 0.2,
    eps_clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    use_engine_log_probs: bool = False,
    per_token: bool = False,
    ref: torch.nn.Module | None = None,
) -> Reference:
    """One step over all samples, whose tokens are all trained; KL by k3."""
    model = copy.deepcopy(lm).double()
    reference = None if ref is None else copy.deepcopy(ref).double()
    terms: dict[str, list[torch.Tensor]] = {"pg": [], "kl": [], "entropy": [], "diff": []}
    all_log_probs = []
    for group in groups:
        for sample, advantage in zip(group.samples, advantages_of(group), strict=True):
            new, entropy = score(model, sample, temperature)
            engine = torch.tensor(list(sample.rollout_log_probs), dtype=torch.float64)
            old = engine if use_engine_log_probs else new.detach()
            ratio = (new - old).exp()
            clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
            terms["pg"].append(torch.maximum(-ratio * advantage, -clipped * advantage))
            terms["entropy"].append(entropy)
            terms["diff"].append((new.detach() - engine).abs())
            gap = new - (new.detach() if reference is None else score(reference, sample, temperature)[0].detach())
            terms["kl"].append(torch.exp(-gap) - 1 + gap)
            all_log_probs.append(new.tolist())

    def mean(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).mean() if per_token else torch.stack([part.mean() for part in parts]).mean()

    means = {name: mean(parts) for name, parts in terms.items()}
    loss = means["pg"] + kl_coef * means["kl"] - entropy_coef * means["entropy"]
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    return Reference(
        loss=loss.item(),
        pg_loss=means["pg"].item(),
        kl=means["kl"].item(),
        entropy=means["entropy"].item(),
        abs_diff=means["diff"].item(),
        grad_norm=norm,
        gradients=gradients,
        log_probs=all_log_probs,
    )
