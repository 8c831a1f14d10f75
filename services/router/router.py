"""The router as a whole, without its servers: workers, their probes, and the pass-through, kept in step."""

import asyncio

import structlog

from services.router.http.calls import CallAnswer, call
from services.router.http.connections import NotOpened
from services.router.http.proxy import Proxy
from services.router.http.upstream import UpstreamError
from services.router.settings import RouterSettings
from services.router.watch.observer import Observer
from services.router.workers.health import Probes
from services.router.workers.workers import Worker, Workers

log = structlog.get_logger()

ABORT_TIMEOUT_S = 10.0


class Router:
    """What both control surfaces act on. Raises what `Workers` raises."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.workers = Workers(settings)
        self.observer = Observer(settings, self.workers)
        self.proxy = Proxy(self.workers, settings)
        self._probes = Probes(self.workers, settings)

    def add(self, url: object, *, admit: bool) -> Worker:
        """Register a worker, anew if its address is known, and begin to probe it."""
        worker = self.workers.add(url, admit=admit)
        self._probes.watch(worker)
        return worker

    def remove(self, name: str) -> bool:
        """Take a worker out, by id or address. False: there is none."""
        worker = self.workers.find(name)
        if worker is None:
            return False
        self.proxy.forget(worker)
        return self.workers.remove(name)

    async def abort(self, body: bytes) -> dict[str, int | str]:
        """Hand an abort to every worker that may hold the request; what each answered: a status, or why none."""
        everyone = self.workers.everyone()
        answers = await asyncio.gather(*(self._abort_on(worker, body) for worker in everyone))
        return {str(worker.url): answer for worker, answer in zip(everyone, answers, strict=True)}

    async def tend(self) -> None:
        """Close connections that nobody uses; runs until cancelled."""
        while True:
            await asyncio.sleep(self.settings.idle_connection_s)
            self.proxy.drop_old_connections()

    def stop_taking(self) -> None:
        """No new requests from now on; those that wait for a worker are told so."""
        self.workers.close()

    async def close(self) -> None:
        """End probes and unused connections."""
        await self._probes.close()
        self.proxy.close()

    async def _abort_on(self, worker: Worker, body: bytes) -> int | str:
        try:
            answer: CallAnswer = await call(worker.url, "POST", "/abort_request", timeout_s=ABORT_TIMEOUT_S, body=body)
        except (NotOpened, UpstreamError, TimeoutError) as error:
            log.warning("abort_failed", worker=worker.worker_id, url=str(worker.url), error=repr(error))
            return str(error) or f"not answered within {ABORT_TIMEOUT_S:g} s"
        if answer.status >= 300:
            log.warning("abort_failed", worker=worker.worker_id, url=str(worker.url), status=answer.status)
        return answer.status
