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
        self._values: deque[float] = deque(maxlen=size)
        self._since_nonfinite = size
        """Points since one was not finite."""
        self._seen: set[int] = set()
        self._order: deque[int] = deque()
        self._floor = -(2**63)
        """Steps up to here are so old that they may have been seen."""

    def begin_attempt(self, attempt: int, step: int) -> None:
        """A newer attempt goes on from a step: what an older one said from there on is not part of the curve."""
        self.attempt = attempt
        kept = [point for point in self.points if point.step < step]
        self.points.clear()
        self._values.clear()
        for point in kept:
            self.add(point)
        self._seen.clear()
        self._order.clear()
        self._floor = -(2**63)

    def is_new(self, step: int) -> bool:
        """Whether this step was not seen in this attempt; it is from now on."""
        if step in self._seen or step <= self._floor:
            return False
        if len(self._order) >= MAX_SEEN:
            oldest = self._order.popleft()
            self._seen.discard(oldest)
            self._floor = max(self._floor, oldest)
        self._seen.add(step)
        self._order.append(step)
        return True

    def add(self, point: Point) -> None:
        self.points.append(point)
        self._values.append(point.value)
        self._since_nonfinite = self._since_nonfinite + 1 if math.isfinite(point.value) else 0

    def finite(self, *, besides_last: int = 0) -> list[float]:
        """The finite numbers, oldest first, without the last points."""
        values = list(self._values)
        if besides_last:
            values = values[:-besides_last]
        if self._since_nonfinite >= len(self.points):
            return values
        return [value for value in values if math.isfinite(value)]
