"""How long commits took. The writer's thread adds, anyone reads."""

import bisect


class CommitTimes:
    """A histogram since the start."""

    bounds = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
    """Seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)
        """How many took at most each of the bounds, and more than the one before; at last those above all."""
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """One commit."""
        self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds
