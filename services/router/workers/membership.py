"""Who is registered: workers in, out, found, and watched.

A worker object is one registration. Registering the same address again makes a new one, with counters of its own: what
is still in flight on the old one ends there and cannot touch the new one. Chooses nobody; see `workers.py`.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable

import structlog

from services.router.settings import RouterSettings
from services.router.workers.breaker import Breaker
from services.router.workers.counts import Counts
from services.router.workers.registration import Record, Registration
from services.router.workers.urls import BadUrl, WorkerUrl, parse_worker_url
from services.router.workers.worker import Worker

log = structlog.get_logger()

PLAIN = Registration()


class TooManyWorkers(Exception):
    """The limit of registered workers is reached."""


class Membership:
    """The registered workers, and those that finish what they have."""

    def __init__(self, settings: RouterSettings, counts: Counts) -> None:
        self._settings = settings
        self._counts = counts
        self._current: dict[WorkerUrl, Worker] = {}
        self._by_id: dict[str, Worker] = {}
        self._leaving: list[Worker] = []
        self._watching: set[asyncio.Event] = set()
        self._closed = False
        self.on_change: list[Callable[[], None]] = []
        """Called after every change of membership or state; must not block or raise."""
        self.on_left: Callable[[Worker], None] | None = None
        """Called for each registration that ends, also by one that takes its place; must not block or raise."""

    def add(self, url: object, *, admit: bool, registration: Registration = PLAIN, configured: bool = False) -> Worker:
        """Register a worker, or start the registration of a known address anew. Raises BadUrl, TooManyWorkers.

        admit: it needs no confirmation of its weights. An address that needed one before keeps needing it until it is
        removed, so that nobody gets an engine with old weights back by registering it once more.
        """
        normal = parse_worker_url(url, allowed=self._settings.worker_allow)
        old = self._current.get(normal)
        admit = not self._settings.require_policy_version or (admit and (old is None or old.self_admitting))
        return self._register(normal, str(uuid.uuid4()), registration, admit=admit, paused=False, configured=configured)

    def restore(self, record: Record) -> Worker:
        """Register a worker as it was before a restart of the router; nothing of it is proven. Raises as `add`."""
        normal = parse_worker_url(record.url, allowed=self._settings.worker_allow)
        return self._register(
            normal,
            record.worker_id,
            record.registration,
            admit=record.self_admitting or not self._settings.require_policy_version,
            paused=record.paused,
            configured=record.configured,
        )

    def records(self) -> list[Record]:
        """What is to be kept of the registered workers over a restart."""
        return [worker.record() for worker in self._current.values()]

    def _register(
        self, url: WorkerUrl, worker_id: str, said: Registration, *, admit: bool, paused: bool, configured: bool
    ) -> Worker:
        old = self._current.get(url)
        if old is None and len(self._current) >= self._settings.max_workers:
            raise TooManyWorkers(
                f"{self._settings.max_workers} workers are registered, the limit --router-max-workers: remove one with "
                "DELETE /workers/ID, or raise the limit"
            )
        limits = self._settings
        worker = Worker(
            worker_id=worker_id,
            url=url,
            registration=said,
            configured=configured,
            self_admitting=admit,
            admitted=admit and not paused,
            was_admitted=admit,
            breaker=Breaker(failures_to_open=limits.breaker_failures, pause_s=limits.breaker_pause_s),
        )
        if not self._counts.joined(worker):
            raise TooManyWorkers("too many workers that were removed finish what they have still: try again later")
        if old is not None:
            self._leave(old)
        self._current[url] = self._by_id[worker_id] = worker
        log.info("worker_joined", worker=worker_id, url=worker.name, admitted=worker.admitted, again=old is not None)
        self._changed()
        return worker

    def remove(self, name: str) -> bool:
        """Take a worker out, by id or address; requests in flight end in peace. False: there is none."""
        worker = self.registered(name)
        if worker is None:
            return False
        self._leave(worker)
        log.info("worker_left", worker=worker.worker_id, url=worker.name, in_flight=worker.in_flight)
        self._changed()
        return True

    def find(self, name: str) -> Worker | None:
        """The worker of an id or an address, also one that finishes what it has."""
        found = self.registered(name)
        if found is not None:
            return found
        try:
            name = str(parse_worker_url(name))
        except BadUrl:
            pass  # then it can only be an id
        return next((w for w in reversed(self._leaving) if name in (w.worker_id, w.name)), None)

    def registered(self, name: str) -> Worker | None:
        """The registered worker of an id or an address."""
        if found := self._by_id.get(name):
            return found
        try:
            return self._current.get(parse_worker_url(name))
        except BadUrl:
            return None

    def all(self) -> list[Worker]:
        """In the order of registration, then those that finish what they have, unless their address is back."""
        return self._fresh([*self._current.values(), *(w for w in self._leaving if w.url not in self._current)])

    def everyone(self) -> list[Worker]:
        """One worker for each address that may still be answering something."""
        return self._fresh(list({w.url: w for w in (*self._leaving, *self._current.values())}.values()))

    async def changes(self) -> AsyncIterator[None]:
        """Now, and again after every change of membership or state. Changes close together come as one."""
        event = asyncio.Event()
        self._watching.add(event)
        try:
            while not self._closed:
                event.clear()
                yield
                await event.wait()
        finally:
            self._watching.discard(event)

    def _leave(self, worker: Worker) -> None:
        worker.removed = True
        worker.probe_soon.set()
        del self._current[worker.url]
        del self._by_id[worker.worker_id]
        self._leaving.append(worker)
        if self.on_left is not None:
            self.on_left(worker)
        self._forget_idle()

    def _forget_idle(self) -> None:
        idle = [worker for worker in self._fresh(self._leaving) if self._counts.is_over(worker)]
        for worker in idle:
            self._leaving.remove(worker)
            self._counts.forgotten(worker)
        if idle:
            self._tell()

    def _fresh(self, workers: Iterable[Worker]) -> list[Worker]:
        listed = list(workers)
        self._counts.refresh(listed)
        return listed

    def _changed(self) -> None:
        self._tell()

    def _tell(self) -> None:
        for event in self._watching:
            event.set()
        for callback in self.on_change:
            callback()
