"""The workers: who is registered, who may take requests, who takes the next one, and who waits.

Owns every state and counter of a worker. Opens no socket: probes and requests tell it what they saw. Everything here
runs on the event loop and never awaits between a look and a change, so that no lock is needed.
"""

import random
import time
from collections.abc import Callable, Collection

import structlog

from services.router.settings import RouterSettings
from services.router.workers import life
from services.router.workers.counts import Counts
from services.router.workers.membership import Membership, TooManyWorkers
from services.router.workers.queue import (
    CallLater,
    NoReadyWorker,
    NoSuchWorker,
    Queue,
    QueueFull,
    Refused,
    Stopping,
    Ticket,
)
from services.router.workers.registration import Registration
from services.router.workers.selection import Selection
from services.router.workers.urls import BadUrl, BadWorker
from services.router.workers.want import ANY, Want
from services.router.workers.worker import Life, State, Worker

__all__ = [
    "ANY", "BadUrl", "BadWorker", "Life", "NoReadyWorker", "QueueFull", "Refused", "Registration", "State", "Ticket",
    "TooManyWorkers", "Want", "Worker", "Workers",
]  # fmt: skip

log = structlog.get_logger()


class Workers(Membership):
    """All registered workers."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        counts: Counts | None = None,
        random_source: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater | None = None,
    ) -> None:
        super().__init__(settings, counts or Counts())
        self._clock = clock
        self._selection = Selection(
            self._current.values, settings, self._counts, random_source or random.Random(), clock
        )
        self._queue = Queue(self._pick, self._too_long, clock, call_later)

    def set_state(self, worker: Worker, *, admit: bool, policy_version: int | None) -> None:
        """Set admission and the policy version. Whoever confirms a version once is asked again after a restart."""
        life.set_state(worker, admit=admit, policy_version=policy_version, settings=self._settings)
        worker.probe_soon.set()
        self._changed()

    # Choice and counters

    def num_ready(self) -> int:
        """Workers that take requests now."""
        return 0 if self._closed else self._selection.num_ready()

    def num_waiting(self) -> int:
        """Requests that wait for a worker."""
        return self._queue.num_waiting

    def take(self, want: Want = ANY, *, but_not: Collection[Worker] = ()) -> Worker | None:
        """The worker for the next request, which counts as in flight there until `give_back`.

        None: no worker as wanted, other than `but_not`, can take it now, or somebody waits who was first.
        """
        if self._queue.num_waiting:
            self._queue.serve()  # a breaker's pause may be over, or another process may have made room
        return self._pick(want, but_not)

    def queue(
        self,
        want: Want,
        on_worker: Callable[[Worker], None],
        on_refused: Callable[[Refused], None],
        *,
        but_not: Collection[Worker] = (),
        deadline: float | None = None,
    ) -> Ticket:
        """Wait in line for a worker. Raises Refused at once when there is no place in line, or no sense in it.

        on_worker: called once with a worker that was taken, like `take`; also while this call still runs.
        on_refused: called once instead, when the time is over or the router stops.
        deadline: monotonic time; by default --router-queue-timeout-s from now.
        """
        now = self._clock()
        if deadline is None:
            deadline = now + self._settings.queue_timeout_s
        if self._closed:
            raise Stopping("the router is stopping: send the request to another one, or again later")
        if not self._current and not self._settings.require_policy_version:  # nobody is going to bring one
            raise NoReadyWorker("no worker is registered: POST /workers with its url, or start with --worker-urls")
        if want.labels and not any(want.labels <= worker.label_set for worker in self._current.values()):
            raise NoSuchWorker(
                f"no registered worker has the labels {want.shown_labels[:200]}. GET /workers lists them with theirs"
            )
        if self._queue.num_waiting >= self._settings.max_queued:
            raise QueueFull(
                f"{self._settings.max_queued} requests wait already, the limit --router-max-queued: send it again later"
            )
        if deadline <= now:
            raise self._too_long(want)
        ticket = Ticket(want, on_worker, on_refused, frozenset(but_not), deadline)
        self._queue.put(ticket)
        self._queue.serve()
        return ticket

    def give_back(self, worker: Worker) -> None:
        """The counterpart of `take`; once for each."""
        self._counts.give_back(worker)
        assert worker.in_flight >= 0, f"{worker.name} was given back more often than taken"
        if worker.breaker.is_open:
            worker.breaker.ended(worker.in_flight, self._clock())
        if worker.removed:
            self._forget_idle()
        elif self._queue.num_waiting:
            self._queue.serve(at_most=1)

    def heard(self, worker: Worker) -> None:
        """A byte of an answer came."""
        worker.last_heard = self._clock()

    def answered(self, worker: Worker, status: int) -> None:
        """A whole answer came."""
        worker.num_requests += 1
        if status >= 500:
            self.failed(worker, f"answered {status}")
        elif worker.breaker.failures_in_a_row:
            self._close_breaker(worker)

    def failed(self, worker: Worker, error: str) -> None:
        """A request ended in an error on the worker's side."""
        worker.num_failures += 1
        worker.last_error = error
        was_open = worker.breaker.is_open
        worker.breaker.failed(self._clock())
        if worker.breaker.is_open and not was_open:
            log.warning("breaker_opened", worker=worker.worker_id, url=worker.name, error=error)
            if not worker.removed:
                self._selection.opened(worker)
                self._queue.serve()  # if nobody is well any more, those whose breaker is open serve again

    # Life

    def gone(self, worker: Worker, error: str) -> None:
        """Nobody listens at its address: its process ended, and what weights the next one holds is not known."""
        if life.gone(worker, error):
            self._changed()

    def probe_answered(self, worker: Worker) -> None:
        """A health probe was answered well."""
        if life.probe_answered(worker, self._settings, now=self._clock()):
            self._close_breaker(worker)
            self._changed()

    def probe_failed(self, worker: Worker, error: str, *, timed_out: bool = False, refused: bool = False) -> None:
        """A health probe got no good answer; see `life.probe_failed`."""
        now = self._clock()
        self._counts.refresh((worker,))
        if life.probe_failed(worker, error, self._settings, now=now, timed_out=timed_out, refused=refused):
            self._changed()

    # Changes

    def close(self) -> None:
        """Take no more requests; those that wait are told so."""
        self._closed = True
        self._changed()
        self._queue.refuse_all(Stopping("the router is stopping: send the request to another one, or again later"))

    def recount(self) -> None:
        """Counts were changed by another process: there may be room, and who was leaving may have left."""
        self._forget_idle()
        self._queue.serve()

    def _leave(self, worker: Worker) -> None:
        self._selection.closed(worker)
        super()._leave(worker)

    def _pick(self, want: Want, but_not: Collection[Worker]) -> Worker | None:
        return None if self._closed else self._selection.take(want, but_not)

    def _too_long(self, want: Want) -> Refused:
        fitting = [w for w in self._fresh(self._current.values()) if want.labels <= w.label_set]
        labels = f" with the labels {want.shown_labels[:200]}" if want.labels else ""
        limit_s = self._settings.queue_timeout_s
        return NoReadyWorker(
            f"no worker{labels} could take the request within {limit_s:g} s (--router-queue-timeout-s): "
            f"{life.why(fitting)}"
        )

    def _close_breaker(self, worker: Worker) -> None:
        if worker.breaker.is_open:
            log.info("breaker_closed", worker=worker.worker_id, url=worker.name)
            self._selection.closed(worker)
        worker.breaker.succeeded()
        self._queue.serve()

    def _changed(self) -> None:
        self._selection.changed()
        self._tell()
        if self._queue.num_waiting:
            self._queue.serve()
