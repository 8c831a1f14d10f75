"""The counts of several processes: sums over shared memory, a limit that holds across them, and who is to be woken.

Writes only this process's column. Knows no registry and no connection.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from operator import add

from services.router.processes.breaker import SharedBreaker
from services.router.processes.memory import SharedMemory
from services.router.settings import RouterSettings
from services.router.workers.counts import Counts
from services.router.workers.worker import Worker

NO_LIMIT = sys.maxsize
PRIMARY = 0
SLOTS_PER_WORKER = 4
"""Registrations that are over keep their place until their last request ended: room for more than are registered."""
SPARE_SLOTS = 64


def num_slots(settings: RouterSettings) -> int:
    """Registrations that there may be at once, with those that are leaving."""
    return SLOTS_PER_WORKER * settings.max_workers + SPARE_SLOTS


class SharedCounts(Counts):
    """Counts of one process of several.

    wakers: an event descriptor for each process, that it listens on.
    requests, failures, heard: this process's own columns; of failures and answered requests it keeps the totals.
    """

    def __init__(self, memory: SharedMemory, settings: RouterSettings, *, column: int, wakers: Sequence[int]) -> None:
        self.memory = memory
        self.column = column
        self._settings = settings
        self._wakers = wakers
        self._own = memory.in_flight[column]
        self.requests = memory.requests[column]
        self.failures = memory.failures[column]
        self.heard = memory.heard[column]
        self._turn = memory.turn
        self._columns = memory.in_flight
        self._other_columns = [k for k in range(memory.num_processes) if k != column]
        self._waiting = [(k, memory.waiting_of(k)) for k in self._other_columns]
        self._high = 0
        """All slots in use are below."""
        self._used: list[memoryview[int]] = []
        """Of each column those, and the turns, to be read as a whole."""

    def joined(self, worker: Worker) -> bool:
        """A registration begins; the worker has its slot already."""
        if worker.slot >= self._high:
            self._high = worker.slot + 1
            self._used = [view[: self._high] for view in (*self._columns, self._turn)]
        worker.breaker = SharedBreaker(
            self.memory,
            slot=worker.slot,
            column=self.column,
            failures_to_open=self._settings.breaker_failures,
            pause_s=self._settings.breaker_pause_s,
            on_turn=self.wake_others,
        )
        return True

    def is_over(self, worker: Worker) -> bool:
        """Whether this process has nothing in flight there."""
        return not self._own[worker.slot]

    def refresh(self, workers: Iterable[Worker]) -> None:
        """Bring `in_flight` and the turns of these up to date."""
        if not self._used:
            return
        sums, *more, turns = [view.tolist() for view in self._used]
        for column in more:
            sums = list(map(add, sums, column))
        for worker in workers:
            slot = worker.slot
            worker.in_flight = sums[slot]
            worker.last_turn = turns[slot]

    def take(self, worker: Worker, limit: int) -> bool:
        """One more, unless that would be more than limit over all processes."""
        slot = worker.slot
        if limit < NO_LIMIT:
            self.memory.lock(slot)
            total = self.memory.sum_of(self._columns, slot)
            if total >= limit:
                self.memory.unlock(slot)
                worker.in_flight = total
                return False
            self._own[slot] += 1
            self.memory.unlock(slot)
        else:
            self._own[slot] += 1
        worker.in_flight += 1
        now = time.monotonic_ns()
        self._turn[slot] = now
        if worker.in_flight == 1:
            self.heard[slot] = now
        return True

    def give_back(self, worker: Worker) -> None:
        """One less; who waits for it elsewhere is told."""
        slot = worker.slot
        left = self._own[slot] - 1
        assert left >= 0, f"{worker.name} was given back more often than taken"
        self._own[slot] = left
        total = 0
        for column in self._columns:
            total += column[slot]
        worker.in_flight = total
        for other, waiting in self._waiting:
            if waiting[0]:
                self.wake(other)
        if worker.removed and self.column != PRIMARY:
            self.wake(PRIMARY)

    # Beyond the counts of one process

    def total(self, workers: Iterable[Worker]) -> None:
        """Bring what is shown of these up to date: totals, and when they were last heard of."""
        memory = self.memory
        for worker in workers:
            slot = worker.slot
            worker.num_requests = memory.sum_of(memory.requests, slot)
            worker.num_failures = memory.sum_of(memory.failures, slot)
            worker.last_heard = max(worker.last_heard, max(column[slot] for column in memory.heard) / 1e9)

    def wake(self, column: int) -> None:
        """Have a process look at the shared numbers."""
        os.eventfd_write(self._wakers[column], 1)

    def wake_others(self) -> None:
        """All but this one."""
        for column in self._other_columns:
            self.wake(column)

    def anybody_waits_elsewhere(self) -> bool:
        """Whether a request waits in another process."""
        for _, waiting in self._waiting:  # noqa: SIM110  a generator costs more than the look, once a request
            if waiting[0]:
                return True
        return False

    def num_waiting_elsewhere(self) -> int:
        """Requests that wait in other processes."""
        total = 0
        for _, waiting in self._waiting:
            total += waiting[0]
        return total

    def first_elsewhere(self, since_ns: int) -> tuple[int, int] | None:
        """The process in which a request waits that came before, and since when. None: there is none."""
        first: tuple[int, int] | None = None
        for column in self._other_columns:
            other = self.memory.waiting_since(column)
            if other and other < since_ns:
                first, since_ns = (column, other), other
        return first


class PrimaryCounts(SharedCounts):
    """Those of the process that owns the registry: it also deals out slots.

    taken_in: whether every process has heard that a worker is removed.
    """

    def __init__(
        self,
        memory: SharedMemory,
        settings: RouterSettings,
        *,
        wakers: Sequence[int],
        taken_in: Callable[[Worker], bool],
    ) -> None:
        super().__init__(memory, settings, column=PRIMARY, wakers=wakers)
        self._taken_in = taken_in
        self._free: list[int] = []

    def joined(self, worker: Worker) -> bool:
        """A registration begins. False: too many are leaving still."""
        if self._free:
            worker.slot = heappop(self._free)
        elif self._high < self.memory.num_slots:
            worker.slot = self._high
        else:
            return False
        self.memory.clear_slot(worker.slot)
        return super().joined(worker)

    def is_over(self, worker: Worker) -> bool:
        """Whether no process has anything in flight there, nor will have."""
        return self._taken_in(worker) and not self.memory.sum_of(self._columns, worker.slot)

    def forgotten(self, worker: Worker) -> None:
        """A registration is over in all processes: its slot is free."""
        heappush(self._free, worker.slot)
