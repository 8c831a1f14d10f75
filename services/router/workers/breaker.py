"""The circuit breaker of one worker: after failures in a row it gets one request a pause, to see whether it is well.

Knows times and numbers only. That an open worker is used all the same when every other is open too is the choice's
matter (`workers.py`): a breaker spares clients a bad worker, it never refuses one by itself.
"""

import enum


class BreakerState(enum.StrEnum):
    """As shown."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Closed: gets requests. Open: gets none until `try_at`. Half-open: one is under way, to see."""

    __slots__ = ("_failures_to_open", "_floor", "_pause_s", "_trial", "failures_in_a_row", "is_open", "try_at")

    def __init__(self, *, failures_to_open: int, pause_s: float) -> None:
        self._failures_to_open = failures_to_open
        self._pause_s = pause_s
        self._trial = False
        self._floor = 0
        self.failures_in_a_row = 0
        self.is_open = False
        """Also while half-open."""
        self.try_at = 0.0
        """Monotonic time from which one request may try an open worker."""

    @property
    def state(self) -> BreakerState:
        """Half-open: a request that tries it is under way."""
        if not self.is_open:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._trial else BreakerState.OPEN

    def failed(self, now: float) -> None:
        """A request failed on the worker's side."""
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= self._failures_to_open:
            self.is_open = True
            self._trial = False
            self.try_at = now + self._pause_s

    def succeeded(self) -> None:
        """A request was answered, or the worker began anew."""
        self.failures_in_a_row = 0
        self.is_open = self._trial = False

    def may_try(self, now: float) -> bool:
        """Whether the next request may be the one that tries an open worker."""
        return self.is_open and not self._trial and now >= self.try_at

    def begin_trial(self, in_flight: int) -> None:
        """The request that tries it is under way; in_flight: how many it was answering before."""
        self._trial = True
        self._floor = in_flight

    def ended(self, in_flight: int, now: float) -> None:
        """A request is over, whatever came of it. A trial whose client left has proved nothing: another, later."""
        if self._trial and in_flight <= self._floor:
            self._trial = False
            self.try_at = now + self._pause_s
