"""Health probes: one task a worker, each probe on a connection of its own, never through the pool that requests use.

Only looks and reports; `life.py` decides what it means. So many at once and no more, each at a moment of its own, and
those that do not answer wait for each other, not before those that do.
"""

import asyncio
import random
import time

import structlog

from services.router.http.calls import CALLER, IN_A_CIRCLE, call
from services.router.http.connections import ConnectTimeout, Exhausted, NotOpened, Refused
from services.router.http.upstream import UpstreamError
from services.router.settings import RouterSettings
from services.router.watch.observer import Observer
from services.router.workers.worker import Life, Worker
from services.router.workers.workers import Workers

log = structlog.get_logger()

PROBE_PATH = "/ready"
"""Answered at once by engines, with 503 while they are paused."""
FALLBACK_PATH = "/health"
"""For engines without the other; may run a generation of one token, and take a second."""
FIRST_WAIT_S = 0.1
MAX_AT_ONCE = 128
"""Probes at once of workers that are well, as many of newcomers, and as many of those that failed their last one: one
that does not answer takes all of its time and would hold the others up."""


class Probes:
    """The probing tasks."""

    def __init__(self, workers: Workers, settings: RouterSettings, observer: Observer, identity: bytes) -> None:
        """identity: of this router."""
        self._workers = workers
        self._settings = settings
        self._observer = observer
        self._headers = ((CALLER, identity),)
        self._random = random.Random()
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._for_well, self._for_new, self._for_bad = (asyncio.Semaphore(MAX_AT_ONCE) for _ in range(3))

    def watch(self, worker: Worker) -> None:
        """Probe a worker from now on, until it is removed."""
        task = asyncio.create_task(self._run(worker), name=f"probe {worker.name}")
        self._tasks[worker] = task
        task.add_done_callback(lambda _: self._tasks.pop(worker, None))

    async def close(self) -> None:
        """End all probing."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, worker: Worker) -> None:
        path = PROBE_PATH
        quick_s = FIRST_WAIT_S
        spread = (0.0, 1.0)  # those that were registered together part with their second probe
        while not worker.removed:
            worker.probe_soon.clear()
            path = await self._in_turn(worker, path)
            wait_s = quick_s = min(2 * quick_s, self._settings.health_interval_s)
            if worker.life is Life.UP:
                wait_s, quick_s = self._settings.health_interval_s * self._random.uniform(*spread), FIRST_WAIT_S
                spread = (0.8, 1.2)
            try:
                async with asyncio.timeout(wait_s):
                    await worker.probe_soon.wait()
            except TimeoutError:
                pass

    async def _in_turn(self, worker: Worker, path: str) -> str:
        async with self._places_for(worker):
            if worker.removed:
                return path
            began = time.monotonic()
            try:
                path, ok = await self._probe(worker, path)
            except Exception as error:  # the top of the task: without it the worker would never be looked at again
                log.exception("probe_broken", worker=worker.worker_id, url=worker.name)
                self._workers.probe_failed(worker, f"GET {path}: {error!r}")
                ok = False
            self._observer.probe(worker, ok, time.monotonic() - began)
            return path

    def _places_for(self, worker: Worker) -> asyncio.Semaphore:
        if worker.bad_probes or worker.life is Life.DOWN:
            return self._for_bad
        return self._for_well if worker.life is Life.UP else self._for_new

    async def _probe(self, worker: Worker, path: str) -> tuple[str, bool]:
        """One probe; the path for the next one, and whether this one was answered well."""
        try:
            limits = self._settings
            answer = await call(
                worker.url,
                "GET",
                path,
                timeout_s=limits.health_timeout_s,
                headers=self._headers,
                worker_ca=limits.worker_ca,
            )
        except Refused as error:
            self._workers.gone(worker, str(error))
            return PROBE_PATH, False
        except (TimeoutError, ConnectTimeout):
            limit_s = self._settings.health_timeout_s
            self._workers.probe_failed(worker, f"GET {path} was not answered within {limit_s:g} s", timed_out=True)
            return path, False
        except Exhausted as error:  # the router's own trouble, which must not cost a worker its confirmed weights
            log.error("probe_not_possible", worker=worker.worker_id, url=worker.name, error=str(error))
            return path, False
        except (NotOpened, UpstreamError) as error:
            self._workers.probe_failed(worker, f"GET {path}: {error}")
            return path, False
        if 200 <= answer.status < 300:
            self._workers.probe_answered(worker)
            return path, True
        if path == PROBE_PATH and answer.status in (404, 405, 501):
            return await self._probe(worker, FALLBACK_PATH)
        why = ": this is the router itself; take it out" if answer.status == IN_A_CIRCLE else ""
        self._workers.probe_failed(worker, f"GET {path} was answered {answer.status}{why}", refused=True)
        return path, False
