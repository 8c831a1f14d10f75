"""Bounds of the latency histograms, and what can be read from one. Pure."""

from collections.abc import Sequence

BOUNDS_S: tuple[float, ...] = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0,
)  # fmt: skip
"""Upper bounds in seconds, each inclusive: from a quick answer to a long generation."""
NUM_BUCKETS = len(BOUNDS_S) + 1
"""With the one above the last bound."""


def quantile(counts: Sequence[int], share: float) -> float | None:
    """The time in seconds that `share` of the counted ones do not exceed, by line within its bucket.

    None: nothing is counted. What lies above the last bound is told as the last bound.
    """
    total = sum(counts)
    if not total:
        return None
    rank, seen = share * total, 0
    for index, count in enumerate(counts):
        if count and seen + count >= rank:
            if index == len(BOUNDS_S):
                break
            low = BOUNDS_S[index - 1] if index else 0.0
            return low + (BOUNDS_S[index] - low) * max(0.0, rank - seen) / count
        seen += count
    return BOUNDS_S[-1]
