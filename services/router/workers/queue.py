"""Requests that wait for a worker: in line, for a limited time, and only so many.

Owns the order: who came first is served first, among those that want the same. A request whose wish cannot be met
holds nobody up. Exactly one of a ticket's callbacks is called, once; none after `cancel`. Knows no worker's state: what
may take a request is asked of the `choose` it is given.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

import structlog

from services.router.workers.want import Want
from services.router.workers.worker import Worker

log = structlog.get_logger()

TICK_S = 0.05
"""While somebody waits, how often is looked whether a time limit is over or a worker may be tried again."""
LATE_S = 0.5
"""A tick that comes later than this refuses nobody."""
NO_LIMIT = 1 << 62

_Key = tuple[frozenset[tuple[str, str]], frozenset[Worker]]
PLAIN: _Key = (frozenset(), frozenset())
_News = TypeVar("_News")
CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


class Refused(Exception):
    """A request gets no worker; the message says why and `kind` is for the type of the answer."""

    kind = "refused"


class NoReadyWorker(Refused):
    """No worker could take the request in time."""

    kind = "no_ready_worker"


class NoSuchWorker(NoReadyWorker):
    """No registered worker has the labels that the request asks for."""

    kind = "no_such_worker"


class QueueFull(NoReadyWorker):
    """As many requests as may wait are waiting already."""

    kind = "queue_full"


class Stopping(NoReadyWorker):
    """The router takes no more requests."""

    kind = "stopping"


class Ticket:
    """A place in line."""

    __slots__ = ("_key", "_queue", "but_not", "deadline", "number", "on_refused", "on_worker", "since", "want")

    def __init__(
        self,
        want: Want,
        on_worker: Callable[[Worker], None],
        on_refused: Callable[[Refused], None],
        but_not: frozenset[Worker],
        deadline: float,
    ) -> None:
        self.want = want
        self.but_not = but_not
        self.deadline = deadline
        self.on_worker = on_worker
        self.on_refused = on_refused
        self.number = 0
        self.since = 0.0
        """Monotonic time at which it joined the line."""
        self._key: _Key = (want.labels, but_not)
        self._queue: Queue | None = None

    @property
    def waiting(self) -> bool:
        """Whether it is still in line."""
        return self._queue is not None

    def cancel(self) -> None:
        """Leave the line; no callback comes any more. Does nothing once one came."""
        if self._queue is not None:
            self._queue.take_out(self)


class Line(Protocol):
    """The lines of other processes, for a router of several."""

    def changed(self, queue: "Queue") -> None:
        """Somebody joined or left the line here."""

    def another_first(self, since: float) -> bool:
        """Whether one that has waited here since then lets somebody elsewhere go first."""

    def served(self, since: float) -> None:
        """One that had waited here since then got a worker."""


class Queue:
    """The lines: one for each set of labels and of workers that are not wanted again; usually one."""

    def __init__(
        self,
        choose: Callable[[Want, Collection[Worker]], Worker | None],
        explain: Callable[[Want], Refused],
        clock: Callable[[], float],
        call_later: CallLater | None = None,
    ) -> None:
        self._choose = choose
        self._explain = explain
        self._clock = clock
        self._call_later = call_later
        self._lines: dict[_Key, OrderedDict[Ticket, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at = math.inf
        self._earliest = math.inf
        self._last_number = 0
        self._serving = False
        self._serve_again = False
        self.num_waiting = 0
        self.line: Line | None = None
        """None: there is one process."""

    def put(self, ticket: Ticket) -> None:
        """Join the line."""
        self._last_number += 1
        ticket.number = self._last_number
        ticket.since = self._clock()
        ticket._queue = self
        self._lines.setdefault(ticket._key, OrderedDict())[ticket] = None
        self.num_waiting += 1
        self._earliest = min(self._earliest, ticket.deadline)
        self._arm()
        if self.line is not None:
            self.line.changed(self)

    def take_out(self, ticket: Ticket) -> None:
        """Leave the line."""
        line = self._lines[ticket._key]
        del line[ticket]
        if not line:
            del self._lines[ticket._key]
        ticket._queue = None
        self.num_waiting -= 1
        if not self.num_waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.line is not None:
            self.line.changed(self)

    def first_since(self) -> float:
        """Since when the first waits that any worker would do for. 0.0: there is none."""
        line = self._lines.get(PLAIN)
        return next(iter(line)).since if line else 0.0

    def serve(self, *, at_most: int = NO_LIMIT) -> None:
        """Hand workers over to those that wait, first come first served.

        A callback may call anything, this too: that only makes the loop here go round once more, so that a thousand
        requests that fail at once do not stand on each other's shoulders.
        """
        if self._serving:
            self._serve_again = True
            return
        self._serving = True
        try:
            while self.num_waiting and at_most > 0:
                at_most -= 1
                served = self._serve_one()
                if self._serve_again:
                    self._serve_again, at_most = False, NO_LIMIT
                elif not served:
                    return
        finally:
            self._serving = self._serve_again = False

    def _serve_one(self) -> bool:
        for ticket in self._heads():
            if self.line is not None and self.line.another_first(ticket.since):
                continue
            worker = self._choose(ticket.want, ticket.but_not)
            if worker is not None:
                if self.line is not None:
                    self.line.served(ticket.since)
                self.take_out(ticket)
                _tell(ticket.on_worker, worker)
                return True
        return False

    def _heads(self) -> list[Ticket]:
        heads = [next(iter(line)) for line in self._lines.values()]
        if len(heads) > 1:
            heads.sort(key=lambda ticket: ticket.number)
        return heads

    def tick(self) -> None:
        """Refuse those whose time is over; see whether the others can be served by now."""
        self._timer = None
        now = self._clock()
        is_late = now > self._tick_at + LATE_S  # this process did not run: workers may be free that nobody knows of yet
        if now >= self._earliest and not is_late:
            waiting = [ticket for line in self._lines.values() for ticket in line]
            self._earliest = min((ticket.deadline for ticket in waiting if ticket.deadline > now), default=math.inf)
            over = [ticket for ticket in waiting if ticket.deadline <= now]
            self._refuse(sorted(over, key=lambda ticket: ticket.number), self._explain)
        self.serve()
        self._arm()

    def refuse_all(self, reason: Refused) -> None:
        """Tell all that wait that they will get none."""
        waiting = [ticket for line in self._lines.values() for ticket in line]
        self._refuse(sorted(waiting, key=lambda ticket: ticket.number), lambda _: reason)

    def _refuse(self, tickets: list[Ticket], reason: Callable[[Want], Refused]) -> None:
        for ticket in tickets:
            if ticket.waiting:  # a callback before this one may have cancelled it
                self.take_out(ticket)
                _tell(ticket.on_refused, reason(ticket.want))

    def _arm(self) -> None:
        if self._timer is None and self.num_waiting:
            now = self._clock()
            wait_s = min(TICK_S, max(0.001, self._earliest - now))
            self._tick_at = now + wait_s
            self._timer = (self._call_later or asyncio.get_running_loop().call_later)(wait_s, self.tick)


def _tell(callback: Callable[[_News], None], news: _News) -> None:
    try:
        callback(news)
    except Exception:  # a bug of its owner, which must not cost those behind it their turn
        log.exception("queue_callback_failed")
