"""A worker's circuit breaker that all processes share: what one of them saw counts for all, and one of them tries."""

import time
from collections.abc import Callable

from services.router.processes.memory import SharedMemory
from services.router.workers.breaker import Breaker

NS = 1e9


class SharedBreaker(Breaker):
    """As `Breaker`, with its state in a slot of shared memory.

    on_turn: called when it opened or closed.
    """

    __slots__ = ("_column", "_in_a_row", "_is_open", "_memory", "_on_turn", "_slot")

    def __init__(
        self,
        memory: SharedMemory,
        *,
        slot: int,
        column: int,
        failures_to_open: int,
        pause_s: float,
        on_turn: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._is_open = memory.is_open[slot : slot + 1]
        self._in_a_row = memory.in_a_row[slot : slot + 1]
        self._slot = slot
        self._column = column
        self._failures_to_open = failures_to_open
        self._pause_s = pause_s
        self._on_turn = on_turn
        self._floor = 0

    @property
    def failures_in_a_row(self) -> int:  # type: ignore[override]
        return self._in_a_row[0]

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        return self._is_open[0] != 0

    @property
    def try_at(self) -> float:  # type: ignore[override]
        return self._memory.try_at[self._slot] / NS

    @property
    def _trial(self) -> bool:  # type: ignore[override]
        return bool(self._memory.trial_by[self._slot])

    def failed(self, now: float) -> None:
        """A request failed on the worker's side."""
        memory, slot = self._memory, self._slot
        with memory.locked(slot):
            memory.in_a_row[slot] += 1
            opens = memory.in_a_row[slot] >= self._failures_to_open
            turns = opens and not memory.is_open[slot]
            if opens:
                memory.is_open[slot] = 1
                self._end_trial(now)
        if turns:
            self._tell()

    def succeeded(self) -> None:
        """A request was answered, or the worker began anew."""
        memory, slot = self._memory, self._slot
        with memory.locked(slot):
            turns = memory.is_open[slot]
            memory.in_a_row[slot] = memory.is_open[slot] = memory.trial_by[slot] = 0
        if turns:
            self._tell()

    def begin_trial(self, in_flight: int) -> None:
        """The request that tries it is under way; in_flight: how many it was answering before."""
        with self._memory.locked(self._slot):
            if not self._memory.trial_by[self._slot]:
                self._memory.trial_by[self._slot] = self._column + 1
        self._floor = in_flight

    def ended(self, in_flight: int, now: float) -> None:
        """A request is over, whatever came of it."""
        if self._memory.trial_by[self._slot] == self._column + 1 and in_flight <= self._floor:
            self._end_trial(now)

    def _end_trial(self, now: float) -> None:
        self._memory.trial_by[self._slot] = 0
        self._memory.try_at[self._slot] = int((now + self._pause_s) * NS)

    def _tell(self) -> None:
        self._memory.breakers_changed = time.monotonic_ns()
        self._on_turn()
