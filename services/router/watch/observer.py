"""What the rest of the router calls to be counted: one call a request, and one for a connection, a probe, a retry.

Owns the counters of this process and the access log. On the event loop only; nothing that a request calls awaits,
raises or renders.
"""

import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from services.router.settings import RouterSettings
from services.router.watch.access_log import AccessLog
from services.router.watch.buckets import BOUNDS_S
from services.router.watch.counters import Cell, OfWorker, count
from services.router.watch.finished import WORKER_STATUS, Finished, HasUrl
from services.router.watch.loop_lag import LoopLag
from services.router.watch.path_classes import CLASSES, OTHER
from services.router.watch.process import read_process
from services.router.watch.snapshot import Snapshot, counts_of, worker_views

FORGET_AFTER_S = 120.0
"""How long the series of a worker that left are still shown: longer than Prometheus waits between two scrapes."""


class Registry(Protocol):
    """What is asked of the workers."""

    def all(self) -> Sequence[Any]:  # Any: the view of a worker is made in snapshot.py
        """All that are registered or finish what they have."""
        ...

    def num_waiting(self) -> int:
        """Requests that wait for a worker."""
        ...


class Observer:
    """Counts. `now`: monotonic seconds."""

    def __init__(
        self, settings: RouterSettings, workers: Registry | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.workers = workers
        """To be set once they are made, when they were not at hand."""
        self.access_log = AccessLog(now=now)
        self.cells: dict[tuple[str, str], Cell] = {}
        """By address and path class."""
        self.gone: dict[str, Cell] = {}
        """By path class: what workers had that are no longer shown."""
        self.of_worker: dict[str, OfWorker] = {}
        self.errors: dict[str, int] = {}
        self.retries: dict[str, int] = {}
        self.probes_good = 0
        self.probes_bad = 0
        self.connections_opened = 0
        self.connections_closed = 0
        self._now = now
        self._by_worker: dict[tuple[HasUrl | None, str], Cell] = {}
        """The same cells, by what a request has at hand."""
        self.lag = LoopLag(now=now)
        self.process = "0"
        """The name of this process among several."""
        self.others: Callable[[], Awaitable[Sequence[Snapshot]]] | None = None
        """Asks the router's other processes for their snapshots, and tells what those that ended left."""
        self._started_at = time.time()
        self._every = settings.access_log_every
        self._until_line = settings.access_log_every

    def finished(self, passage: Finished) -> None:
        """A request is over, however it ended. Exactly once for each."""
        cell = self._by_worker.get((passage.worker, passage.path_class))
        if cell is None:
            cell = self._begin_cell(passage.worker, passage.path_class)
        status = passage.status
        try:
            cell.statuses[status] += 1
        except KeyError:
            cell.first_of(status)
        cell.bytes_in += passage.bytes_in
        cell.bytes_out += passage.bytes_out
        seconds = passage.ended - passage.started
        cell.total[bisect_left(BOUNDS_S, seconds)] += 1
        cell.total_s += seconds
        first_byte = passage.first_byte
        if first_byte and passage.worker is not None:  # what the router answers itself has no such time
            seconds = first_byte - passage.sent
            cell.first[bisect_left(BOUNDS_S, seconds)] += 1
            cell.first_s += seconds
        if passage.queued_s:
            cell.queue[bisect_left(BOUNDS_S, passage.queued_s)] += 1
            cell.queue_s += passage.queued_s
        if passage.error or status >= 500:
            self._failed(passage)
            return
        self._until_line -= 1
        if self._until_line == 0:
            self._until_line = self._every
            self.access_log.passed(passage)

    def connection_opened(self) -> None:
        """A client connected."""
        self.connections_opened += 1

    def connection_closed(self) -> None:
        """A client's connection ended. Once for each that was opened."""
        self.connections_closed += 1

    def probe(self, worker: HasUrl, ok: bool, seconds: float) -> None:
        """A health probe of a worker ended."""
        of_worker = self._of(str(worker.url))
        of_worker.probe_s += seconds
        if ok:
            self.probes_good += 1
            of_worker.probes_good += 1
        else:
            self.probes_bad += 1
            of_worker.probes_bad += 1

    def retry(self, kind: str) -> None:
        """A request goes to another worker. kind: why."""
        count(self.retries, kind)

    def forget_gone(self) -> None:
        """Drop the series of workers that left a while ago: what they did stays in the sums over all."""
        if self.workers is None:
            return
        everyone = self.workers.all()
        live = {str(worker.url) for worker in everyone}
        now = self._now()
        over = {url for url, of_worker in self.of_worker.items() if _is_over(of_worker, url in live, now)}
        for url in over:
            del self.of_worker[url]
        for (url, path_class), cell in list(self.cells.items()):
            if url in over:
                del self.cells[url, path_class]
                add_cell(self.gone.setdefault(path_class, Cell()), cell)
        known: set[object] = {None, *everyone}
        self._by_worker = {key: cell for key, cell in self._by_worker.items() if key[0] in known}

    def snapshot(self) -> Snapshot:
        """Everything as plain numbers (snapshot.py), of this process."""
        self.forget_gone()
        workers = [] if self.workers is None else self.workers.all()
        return {
            **counts_of(self),
            "num_waiting": 0 if self.workers is None else self.workers.num_waiting(),
            "workers": worker_views(workers),
            "shown": sorted({*self.of_worker, *(str(worker.url) for worker in workers)}),
            "processes": {self.process: read_process(lag_s=self.lag.worst_s(), started_at=self._started_at)},
        }

    async def snapshots(self) -> list[Snapshot]:
        """This process's, and those of all others."""
        return [self.snapshot(), *(await self.others() if self.others is not None else ())]

    def _failed(self, passage: Finished) -> None:
        kind = passage.error or WORKER_STATUS
        count(self.errors, kind)
        if passage.worker is not None:
            count(self._of(str(passage.worker.url)).errors, kind)
        self.access_log.failed(passage)

    def _begin_cell(self, worker: HasUrl | None, path_class: str) -> Cell:
        shown = path_class if path_class in CLASSES else OTHER
        url = "" if worker is None else str(worker.url)
        if url:
            self._of(url)
        cell = self.cells.get((url, shown))
        if cell is None:
            cell = self.cells[url, shown] = Cell()
        if shown is path_class:
            self._by_worker[worker, path_class] = cell
        return cell

    def _of(self, url: str) -> OfWorker:
        found = self.of_worker.get(url)
        if found is None:
            found = self.of_worker[url] = OfWorker()
        return found


def add_cell(into: Cell, other: Cell) -> None:
    """Add what one cell counted to another."""
    for status, number in other.statuses.items():
        into.statuses[status] = into.statuses.get(status, 0) + number
    into.bytes_in += other.bytes_in
    into.bytes_out += other.bytes_out
    into.total_s += other.total_s
    into.first_s += other.first_s
    into.queue_s += other.queue_s
    into.total = added(into.total, other.total)
    into.first = added(into.first, other.first)
    into.queue = added(into.queue, other.queue)


def added(one: Iterable[int], other: Iterable[int]) -> list[int]:
    """Bucket by bucket."""
    return [a + b for a, b in zip(one, other, strict=True)]


def _is_over(of_worker: OfWorker, is_live: bool, now: float) -> bool:
    if is_live:
        of_worker.unseen_since = 0.0
        return False
    if not of_worker.unseen_since:
        of_worker.unseen_since = now
    return now - of_worker.unseen_since > FORGET_AFTER_S
