"""The learning rate as a pure function of the optimiser step: nothing to save, nothing to restore."""

import math


def learning_rate(step: int, *, peak: float, minimum: float, warmup_steps: int, total_steps: int, style: str) -> float:
    """The rate that optimiser step `step` (from 0) uses.

    Rises linearly in the first warmup_steps steps, reaching the peak with the last of them; then constant, or falls
    linearly or by a half cosine so that the last step of the run would be followed by `minimum`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if style == "constant":
        return peak
    span = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    if style == "linear":
        return minimum + (peak - minimum) * (1.0 - progress)
    if style == "cosine":
        return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"lr_decay_style must be constant, linear or cosine, got {style!r}")
