"""The last points of one series of one run: the current curve, each step once, also over resumes and amendments."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

MAX_SEEN = 256


@dataclass(frozen=True, slots=True)
class Point:
    """One row's number."""

    step: int
    value: float
    values: Mapping[str, float]
    """All that the rule's keys had."""


class Window:
    """Holds at most `size` points."""

    def __init__(self, size: int) -> None:
        self.points: deque[Point] = deque(maxlen=size)
        self.attempt = 0
        self._seen: set[int] = set()
        self._order: deque[int] = deque()

    def begin_attempt(self, attempt: int, step: int) -> None:
        """A newer attempt goes on from a step: what an older one said from there on is not part of the curve."""
        self.attempt = attempt
        kept = [point for point in self.points if point.step < step]
        self.points.clear()
        self.points.extend(kept)
        self._seen.clear()
        self._order.clear()

    def is_new(self, step: int) -> bool:
        """Whether this step was not seen in this attempt; it is from now on."""
        if step in self._seen:
            return False
        if len(self._order) >= MAX_SEEN:
            if step < min(self._seen):
                return False  # so old that it may have been seen
            self._seen.discard(self._order.popleft())
        self._seen.add(step)
        self._order.append(step)
        return True

    def add(self, point: Point) -> None:
        self.points.append(point)

    def finite(self, *, besides_last: int = 0) -> list[float]:
        """The finite numbers, oldest first, without the last points."""
        points = list(self.points)
        if besides_last:
            points = points[:-besides_last]
        return [point.value for point in points if math.isfinite(point.value)]
