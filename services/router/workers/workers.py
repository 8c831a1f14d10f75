"""The workers and their lives: who is registered, who may take requests, who takes the next one.

Owns every state and counter of a worker. Opens no socket: probes and requests tell it what they saw. Everything here
runs on the event loop and never awaits between a look and a change, so that no lock is needed.

A worker object is one registration. Registering the same address again makes a new one, with counters of its own: what
is still in flight on the old one ends there and cannot touch the new one.
"""

import asyncio
import enum
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import structlog

from services.router.settings import RouterSettings
from services.router.workers.choice import Load, choose
from services.router.workers.urls import BadUrl, WorkerUrl, parse_worker_url

log = structlog.get_logger()


class State(enum.Enum):
    """Whether a worker takes requests; the names of furlong.v1.WorkerState."""

    JOINING = 1
    READY = 2
    UNREADY = 3
    DRAINING = 4


class Life(enum.Enum):
    """What probes and connections say of a worker's process."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


class NoReadyWorker(Exception):
    """No worker could take the request in time; the message says why."""


class QueueFull(NoReadyWorker):
    """As many requests as may wait are waiting already."""


class TooManyWorkers(Exception):
    """The limit of registered workers is reached."""


@dataclass(eq=False)
class Worker:
    """One registration of one engine. Only `Workers` changes it."""

    worker_id: str
    url: WorkerUrl
    self_admitting: bool
    """It needs no confirmation of its weights: registered by HTTP, or with admit_without_policy_version."""
    admitted: bool
    was_admitted: bool
    policy_version: int | None = None
    life: Life = Life.UNKNOWN
    removed: bool = False
    in_flight: int = 0
    num_requests: int = 0
    num_failures: int = 0
    last_error: str = ""
    good_probes: int = 0
    """In a row."""
    bad_probes: int = 0
    """In a row."""
    last_heard: float = 0.0
    """Monotonic time of the last byte from it, or of the first request after it was idle."""
    failures_in_a_row: int = 0
    last_failure: float = 0.0
    last_turn: int = 0
    probe_soon: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> State:
        """What follows from the rest."""
        if self.removed:
            return State.DRAINING
        if self.life is Life.DOWN:
            return State.UNREADY
        if self.admitted and self.life is Life.UP:
            return State.READY
        return State.JOINING if self.admitted or not self.was_admitted else State.UNREADY

    def is_failing(self, now: float, settings: RouterSettings) -> bool:
        """Whether its last answers were all errors: then it gets one request now and again, to see if it is over."""
        if self.failures_in_a_row < settings.breaker_failures:
            return False
        return self.in_flight > 0 or now < self.last_failure + settings.breaker_pause_s


class Workers:
    """All registered workers."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._current: dict[WorkerUrl, Worker] = {}
        self._leaving: list[Worker] = []
        self._turn = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._watching: set[asyncio.Event] = set()
        self._closed = False

    # Membership

    def add(self, url: object, *, admit: bool) -> Worker:
        """Register a worker, or start the registration of a known address anew. Raises BadUrl, TooManyWorkers."""
        normal = parse_worker_url(url, allowed=self._settings.worker_allow)
        if old := self._current.pop(normal, None):
            self._leave(old)
        elif len(self._current) >= self._settings.max_workers:
            raise TooManyWorkers(f"{self._settings.max_workers} workers are registered, the limit --router-max-workers")
        worker = Worker(f"worker-{secrets.token_hex(6)}", normal, admit, admit, admit)
        self._current[normal] = worker
        log.info("worker_joined", worker=worker.worker_id, url=str(normal), admitted=admit, again=old is not None)
        self._changed()
        return worker

    def remove(self, name: str) -> bool:
        """Take a worker out, by id or address; requests in flight end in peace. False: there is none."""
        worker = self.find(name)
        if worker is None:
            return False
        del self._current[worker.url]
        self._leave(worker)
        log.info("worker_left", worker=worker.worker_id, url=str(worker.url), in_flight=worker.in_flight)
        self._changed()
        return True

    def find(self, name: str) -> Worker | None:
        """The registered worker of an id or an address."""
        for worker in self._current.values():
            if worker.worker_id == name:
                return worker
        try:
            return self._current.get(parse_worker_url(name))
        except BadUrl:
            return None

    def all(self) -> list[Worker]:
        """In the order of registration, then those that finish what they have, unless their address is back."""
        return [*self._current.values(), *(w for w in self._leaving if w.url not in self._current)]

    def everyone(self) -> list[Worker]:
        """One worker for each address that may still be answering something."""
        return list({w.url: w for w in (*self._leaving, *self._current.values())}.values())

    def set_state(self, worker: Worker, *, admit: bool, policy_version: int | None) -> None:
        """Set admission and the policy version. Whoever confirms a version once is asked again after a restart."""
        worker.self_admitting = worker.self_admitting and policy_version is None
        worker.admitted = admit
        worker.was_admitted = worker.was_admitted or admit
        worker.policy_version = policy_version
        worker.probe_soon.set()
        log.info("worker_set", worker=worker.worker_id, url=str(worker.url), admit=admit, policy_version=policy_version)
        self._changed()

    # Choice and counters

    def num_ready(self) -> int:
        """Workers that take requests now."""
        return 0 if self._closed else sum(w.state is State.READY for w in self._current.values())

    def num_waiting(self) -> int:
        """Requests that wait for a ready worker."""
        return len(self._waiting)

    def take(self, *, but_not: Sequence[Worker] = ()) -> Worker | None:
        """The worker for the next request, which counts as in flight there until `give_back`. None: no other than
        `but_not` is ready."""
        if self._closed:
            return None
        ready = [w for w in self._current.values() if w.state is State.READY and w not in but_not]
        now = time.monotonic()
        index = choose([Load(w.in_flight, w.last_turn, w.is_failing(now, self._settings)) for w in ready])
        if index is None:
            return None
        worker = ready[index]
        self._turn += 1
        worker.last_turn = self._turn
        if worker.in_flight == 0:
            worker.last_heard = now
        worker.in_flight += 1
        return worker

    async def wait_to_take(self, *, deadline: float) -> Worker:
        """`take`, waiting for a worker to be ready within the queue's limits. Raises NoReadyWorker, QueueFull.

        deadline: monotonic time.
        """
        while (worker := self.take()) is None:
            if self._closed:
                raise NoReadyWorker("the router is stopping")
            if len(self._waiting) >= self._settings.max_queued:
                raise QueueFull(f"{self._settings.max_queued} requests wait already, the limit --router-max-queued")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NoReadyWorker(f"no worker was ready within {self._settings.queue_timeout_s:g} s: {self._why()}")
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=left_s)
            finally:
                self._waiting.discard(waiter)
                waiter.cancel()
        return worker

    def give_back(self, worker: Worker) -> None:
        """The counterpart of `take`; once for each."""
        worker.in_flight -= 1
        if worker.removed and worker.in_flight == 0 and worker in self._leaving:
            self._leaving.remove(worker)
            self._tell_watchers()

    def heard(self, worker: Worker) -> None:
        """A byte of an answer came."""
        worker.last_heard = time.monotonic()

    def answered(self, worker: Worker, status: int) -> None:
        """A whole answer came."""
        worker.num_requests += 1
        if status < 500:
            worker.failures_in_a_row = 0
        else:
            self.failed(worker, f"answered {status}")

    def failed(self, worker: Worker, error: str) -> None:
        """A request ended in an error on the worker's side."""
        worker.num_failures += 1
        worker.failures_in_a_row += 1
        worker.last_failure = time.monotonic()
        worker.last_error = error

    # Life

    def gone(self, worker: Worker, error: str) -> None:
        """Nobody listens at its address: its process ended, and what weights the next one holds is not known."""
        before = (worker.state, worker.policy_version)
        worker.life, worker.last_error = Life.DOWN, error
        worker.good_probes = 0
        worker.policy_version = None
        worker.admitted = worker.admitted and worker.self_admitting
        if before != (worker.state, None):
            log.warning("worker_gone", worker=worker.worker_id, url=str(worker.url), error=error)
            self._changed()

    def probe_answered(self, worker: Worker) -> None:
        """A health probe was answered well."""
        worker.good_probes += 1
        worker.bad_probes = 0
        worker.last_heard = time.monotonic()
        if worker.life is not Life.UP and worker.good_probes >= self._settings.health_success_threshold:
            worker.life, worker.last_error, worker.failures_in_a_row = Life.UP, "", 0
            log.info("worker_up", worker=worker.worker_id, url=str(worker.url), state=worker.state.name)
            self._changed()

    def probe_failed(self, worker: Worker, error: str, *, timed_out: bool = False, refused: bool = False) -> None:
        """A health probe got no good answer.

        timed_out: none at all; a worker that is busy with requests may miss probes.
        refused: one with an error status; a worker that takes no requests may say so (an engine is paused while it gets
        new weights).
        """
        silent_s = time.monotonic() - worker.last_heard
        if timed_out and worker.in_flight > 0 and silent_s < self._settings.health_busy_grace_s:
            return
        if refused and worker.life is Life.UP and not worker.admitted:
            return
        worker.good_probes = 0
        worker.bad_probes += 1
        worker.last_error = error
        if worker.life is Life.UP and worker.bad_probes >= self._settings.health_fail_threshold:
            worker.life = Life.DOWN
            log.warning("worker_down", worker=worker.worker_id, url=str(worker.url), error=error)
            self._changed()

    # Changes

    def close(self) -> None:
        """Take no more requests; those that wait are told so."""
        self._closed = True
        self._changed()

    async def changes(self) -> AsyncIterator[list[Worker]]:
        """All workers now, and again after every change of membership or state. Changes close together come as one."""
        event = asyncio.Event()
        self._watching.add(event)
        try:
            while not self._closed:
                event.clear()
                yield self.all()
                await event.wait()
        finally:
            self._watching.discard(event)

    def _leave(self, worker: Worker) -> None:
        worker.removed = True
        worker.probe_soon.set()
        if worker.in_flight:
            self._leaving.append(worker)

    def _changed(self) -> None:
        self._tell_watchers()
        if self._closed or self.num_ready():
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)

    def _tell_watchers(self) -> None:
        for event in self._watching:
            event.set()

    def _why(self) -> str:
        if not self._current:
            return "none is registered"
        shown = [
            f"{w.url} is {w.state.name}{f' ({w.last_error})' if w.last_error else ''}" for w in self._current.values()
        ]
        return "; ".join(shown[:8]) + (f"; and {len(shown) - 8} more" if len(shown) > 8 else "")
