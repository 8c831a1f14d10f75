"""Log-probs and entropy of tokens from hidden states, bounded in memory. Pure functions on tensors."""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 64 * 1024 * 1024
"""Most logits alive at once: 256 MiB in float32."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [token, hidden] to logits [token, vocabulary]."""


def token_log_probs(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float, entropy_gradient: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of each target, entropy), both [token], nats, of logits / temperature in float32.

    logits: [token, vocabulary]; targets: [token]. The entropy is -sum p log p; entropy_gradient: differentiable.
    """
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = log_probs.gather(-1, targets.unsqueeze(-1)).sum(-1)  # a sum of one, not a view: FSDP hooks outputs
    # exp(-inf) * -inf is NaN: a token that cannot be sampled adds nothing to the entropy
    all_log_probs = log_probs if entropy_gradient else log_probs.detach()
    entropy = -(all_log_probs.exp() * all_log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)
    return chosen, entropy


def chunked_log_probs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    *,
    vocabulary_size: int,
    temperature: float,
    entropy_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_log_probs` of head(hidden), with at most CHUNK_ELEMENTS logits at once.

    hidden: [token, hidden]. Several chunks are computed again in the backward pass; one chunk is not.
    """
    rows = max(1, CHUNK_ELEMENTS // vocabulary_size)

    def scored(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_log_probs(head(part), wanted, temperature=temperature, entropy_gradient=entropy_gradient)

    if len(targets) <= rows:
        return scored(hidden, targets)
    parts = [
        checkpoint(scored, part, wanted, use_reentrant=False)
        for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
