"""The workers of one process of several: chooses and waits like `Workers`, in step with the other processes.

Owns how lines of several processes become one: who came first is served first wherever that is, as far as a process
that does not answer holds nobody up for longer than PATIENCE_S.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

from services.router.processes.counts import SharedCounts
from services.router.settings import RouterSettings
from services.router.workers.queue import Line, Queue, QueueFull, Refused, Ticket
from services.router.workers.want import ANY, Want
from services.router.workers.worker import Worker
from services.router.workers.workers import Workers

PATIENCE_S = 0.005
"""How long a request here waits for an older one elsewhere to take what both could have."""
NS = 1e9
First = tuple[int, int]
"""A process in which a request waits, and since when."""


class SharedLine(Line):
    """What a process's queue tells the others, and what it asks of them."""

    def __init__(self, counts: SharedCounts, serve: Callable[[], None]) -> None:
        self._counts = counts
        self._serve = serve
        self._patient_with: First | None = None
        """Whom this process lets go first, since there is something new to take."""
        self._patient_until = 0.0
        self._given_up: First | None = None
        """One that did not take what there was."""
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, queue: Queue) -> None:
        """Somebody joined or left the line here."""
        since = queue.first_since()
        self._counts.memory.set_waiting(self._counts.column, queue.num_waiting, int(since * NS) if since else 0)

    def freed(self) -> None:
        """There may be something new to take: patience begins anew."""
        self._patient_with = None

    def another_first(self, since: float) -> bool:
        """Whether one that waits since then lets somebody in another process go first."""
        first = self._counts.first_elsewhere(int(since * NS))
        if first is None or first == self._given_up:
            return False
        now = time.monotonic()
        if first != self._patient_with:
            self._patient_with, self._patient_until = first, now + PATIENCE_S
            self._counts.wake(first[0])
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._look_again)
        return now < self._patient_until

    def served(self, since: float) -> None:
        """One that had waited since then got a worker: whoever should have been first had the time for it."""
        first = self._counts.first_elsewhere(int(since * NS))
        if first is not None and first == self._patient_with:
            self._given_up = first

    def _look_again(self) -> None:
        self._timer = None
        self._serve()
        if self._patient_with is not None and self._timer is None and time.monotonic() < self._patient_until:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._look_again)


class SharedWorkers(Workers):
    """All registered workers, as one of several processes sees them."""

    def __init__(self, settings: RouterSettings, counts: SharedCounts, **more: Any) -> None:  # Any: as Workers has them
        super().__init__(settings, counts=counts, **more)
        self._shared = counts
        self._requests, self._failures, self._heard = counts.requests, counts.failures, counts.heard
        self._line = self._queue.line = SharedLine(counts, self._queue.serve)
        self._breakers_seen = 0

    def take(self, want: Want = ANY, *, but_not: Collection[Worker] = ()) -> Worker | None:
        """As `Workers.take`; who waits in another process was first."""
        shared = self._shared
        if shared.anybody_waits_elsewhere() and not but_not and shared.first_elsewhere(time.monotonic_ns()):
            return None  # it joins the line here, which knows how long to wait for whom
        return Workers.take(self, want, but_not=but_not)

    def queue(
        self,
        want: Want,
        on_worker: Callable[[Worker], None],
        on_refused: Callable[[Refused], None],
        *,
        but_not: Collection[Worker] = (),
        deadline: float | None = None,
    ) -> Ticket:
        """As `Workers.queue`; all processes together have so many places in line."""
        limit = self._settings.max_queued
        if self.num_waiting_everywhere() >= limit:
            raise QueueFull(f"{limit} requests wait already, the limit --router-max-queued: send it again later")
        return super().queue(want, on_worker, on_refused, but_not=but_not, deadline=deadline)

    def num_waiting_everywhere(self) -> int:
        """Requests that wait for a worker in all processes; `num_waiting` tells those of this one."""
        return self._queue.num_waiting + self._shared.num_waiting_elsewhere()

    def give_back(self, worker: Worker) -> None:
        """The counterpart of `take`."""
        self._line.freed()
        Workers.give_back(self, worker)

    def answered(self, worker: Worker, status: int) -> None:
        """A whole answer came."""
        self._requests[worker.slot] += 1
        Workers.answered(self, worker, status)

    def failed(self, worker: Worker, error: str) -> None:
        """A request ended in an error on the worker's side."""
        self._failures[worker.slot] += 1
        super().failed(worker, error)

    def heard(self, worker: Worker) -> None:
        """A byte of an answer came."""
        self._heard[worker.slot] = time.monotonic_ns()

    def all(self) -> list[Worker]:
        """As `Workers.all`, with totals over all processes."""
        workers = super().all()
        self._shared.total(workers)
        return workers

    def everybody_registered(self) -> list[Worker]:
        """In the order of registration; numbers as last read."""
        return list(self._current.values())

    def find(self, name: str) -> Worker | None:
        """As `Workers.find`, with its numbers over all processes."""
        worker = super().find(name)
        if worker is not None:
            self._shared.refresh((worker,))
            self._shared.total((worker,))
        return worker

    def probe_failed(self, worker: Worker, error: str, *, timed_out: bool = False, refused: bool = False) -> None:
        """A health probe got no good answer; a worker that another process hears from is busy, not dead."""
        self._shared.total((worker,))
        super().probe_failed(worker, error, timed_out=timed_out, refused=refused)

    def recount(self) -> None:
        """Another process changed the shared numbers."""
        if (seen := self._shared.memory.breakers_changed) != self._breakers_seen:
            self._breakers_seen = seen
            for worker in self._current.values():
                (self._selection.opened if worker.breaker.is_open else self._selection.closed)(worker)
        self._line.freed()
        super().recount()
