"""GRPO: rewards of a group become advantages. Numbers in and out; knows neither tokens nor positions in a batch."""

from collections.abc import Sequence

import torch

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that a group of nearly equal rewards stays finite."""


def group_advantages(rewards: Sequence[float], *, normalize_by_std: bool = True) -> list[float]:
    """Advantages of the samples of one group: (r - mean) / (std + 1e-6), std unbiased (divided by n - 1).

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. Equal rewards, and a group of one, give exactly 0.
    normalize_by_std: False leaves the division out (`disable_grpo_std_normalization`).
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    values = torch.tensor(rewards, dtype=torch.float64)
    centred = values - values.mean()
    if normalize_by_std:
        centred = centred / (values.std(correction=1) + STD_FLOOR)
    return [float(value) for value in centred]
