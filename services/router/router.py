"""The router as a whole, without its servers: workers, their probes, what is kept of them, and the pass-through."""

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import structlog

from furlong.config import ConfigError
from furlong.config.errors import Problem
from services.router.control.token import Token
from services.router.http.proxy import Proxy
from services.router.settings import RouterSettings
from services.router.watch.observer import Observer
from services.router.workers.health import Probes
from services.router.workers.registration import DEFAULT_TYPE, NO_LABELS, Record, Registration
from services.router.workers.statefile import StateFile
from services.router.workers.urls import BadWorker, parse_worker_url
from services.router.workers.workers import TooManyWorkers, Worker, Workers

log = structlog.get_logger()


class Others(Protocol):
    """The other processes of this router."""

    async def settled(self) -> None:
        """Return once each of them acts on all changes that were made so far."""


class Router:
    """What both control surfaces act on. Raises what `Workers` raises, and ConfigError for a bad token file."""

    def __init__(
        self, settings: RouterSettings, *, state_file: Path | None = None, workers: Workers | None = None
    ) -> None:
        """state_file: where the membership is kept over a restart; None: nowhere. workers: those of one process of
        several."""
        self.settings = settings
        self.identity = secrets.token_hex(8).encode()
        """Known by in its own calls, should one come back to it."""
        self.token = Token(settings.token_file)
        self.observer = Observer(settings)
        self.workers = workers if workers is not None else Workers(settings)
        self.observer.workers = self.workers
        self.proxy = Proxy(self.workers, settings, self.observer, self.token)
        self.workers.on_left = self.proxy.forget
        self.probes = Probes(self.workers, settings, self.observer, self.identity)
        self._state_path = state_file
        self._state: StateFile | None = None
        """Only once what it holds has been registered: nothing is written over it before."""
        self.others: Others | None = None
        """The other processes; None: there are none."""

    def start(self) -> None:
        """Register the workers of the last router and those of the flags; each has to prove itself. Raises ConfigError.

        Flags say who is there by flags: one that they name no longer is forgotten, one that was removed is back.
        """
        named = [str(self._of_flags(url)) for url in self.settings.worker_urls]
        state = StateFile(self._state_path, self.workers.records) if self._state_path is not None else None
        known = {record.url: record for record in (state.load() if state is not None else ())}
        for url in named:
            record = known.pop(url, None)
            if record is None or not self._restore(record):
                self._watch(self.workers.add(url, admit=True, configured=True))
        for record in known.values():
            if not record.configured:
                self._restore(record)
        if state is not None:
            self.workers.on_change.append(state.changed)
            state.changed()
            self._state = state

    def add(
        self,
        url: object,
        *,
        admit: bool,
        worker_type: str = DEFAULT_TYPE,
        labels: Mapping[str, str] = NO_LABELS,
        priority: int = 0,
        api_key: str | None = None,
    ) -> Worker:
        """Register a worker, anew if its address is known, and begin to probe it. Raises BadWorker, TooManyWorkers."""
        said = Registration(worker_type=worker_type, labels=labels, priority=priority, api_key=api_key)
        return self._watch(self.workers.add(url, admit=admit, registration=said))

    def remove(self, name: str) -> bool:
        """Take a worker out, by id or address. False: none is registered."""
        return self.workers.remove(name)

    async def settled(self) -> None:
        """Return once every process acts on all changes that were made so far."""
        if self.others is not None:
            await self.others.settled()

    async def tend(self) -> None:
        """Close connections that nobody uses, write down who is registered; runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._drop_old_connections())
            if self._state is not None:
                tasks.create_task(self._state.keep())

    def stop_taking(self) -> None:
        """No new requests from now on; those that wait for a worker are told so."""
        self.workers.close()

    async def close(self) -> None:
        """End probes and unused connections; write what is not written."""
        await self.probes.close()
        self.proxy.close()
        if self._state is not None:
            await self._state.close()

    async def _drop_old_connections(self) -> None:
        while True:
            await asyncio.sleep(self.settings.idle_connection_s)
            self.proxy.drop_old_connections()

    def _watch(self, worker: Worker) -> Worker:
        self.probes.watch(worker)
        return worker

    def _restore(self, record: Record) -> bool:
        try:
            self._watch(self.workers.restore(record))
        except (BadWorker, TooManyWorkers) as error:  # the flags changed since
            log.error("worker_not_restored", url=record.url, error=str(error))
            return False
        return True

    def _of_flags(self, url: str) -> object:
        try:
            return parse_worker_url(url, allowed=self.settings.worker_allow)
        except BadWorker as error:
            remedy = "Mend or leave out this one of --router-worker-urls."
            raise ConfigError([Problem("router.router_worker_urls", url, str(error), remedy)]) from error
