"""Fewer points of a curve, with every peak and dip of it kept. Pure."""

import math
from collections.abc import Sequence


def thinned(values: Sequence[float | None], max_points: int) -> list[int]:
    """Which points to keep, by index, in order: the first, the last, and of each stretch the lowest and the highest.

    A stretch that has a NaN (None) keeps one, so that a curve never looks sounder than it is. Never more than
    max_points, which is at least 5.
    """
    if len(values) <= max_points:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    has_gaps = any(value is None or math.isnan(value) for value in values)
    num_stretches = (max_points - 2) // (3 if has_gaps else 2)
    for stretch in range(num_stretches):
        begin = stretch * len(values) // num_stretches
        end = (stretch + 1) * len(values) // num_stretches
        kept.update(_extremes(values, begin, end))
    return sorted(kept)


def _extremes(values: Sequence[float | None], begin: int, end: int) -> list[int]:
    low = high = gap = None
    for index in range(begin, end):
        value = values[index]
        if value is None or math.isnan(value):
            gap = index if gap is None else gap
            continue
        if low is None or value < values[low]:  # type: ignore[operator]  # never a gap
            low = index
        if high is None or value > values[high]:  # type: ignore[operator]
            high = index
    return [index for index in (low, high, gap) if index is not None]
