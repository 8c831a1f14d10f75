"""Health probes: one task a worker, each probe on a connection of its own, never through the pool that requests use.

Only looks and reports; `workers.py` decides what it means.
"""

import asyncio

from services.router.http.calls import call
from services.router.http.connections import ConnectTimeout, NotOpened, Refused
from services.router.http.upstream import UpstreamError
from services.router.settings import RouterSettings
from services.router.workers.workers import Life, Worker, Workers

PROBE_PATH = "/ready"
"""Answered at once by engines, with 503 while they are paused."""
FALLBACK_PATH = "/health"
"""For engines without the other; may run a generation of one token, and take a second."""
FIRST_WAIT_S = 0.1


class Probes:
    """The probing tasks."""

    def __init__(self, workers: Workers, settings: RouterSettings) -> None:
        self._workers = workers
        self._settings = settings
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def watch(self, worker: Worker) -> None:
        """Probe a worker from now on, until it is removed."""
        task = asyncio.create_task(self._run(worker), name=f"probe {worker.url}")
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
        wait_s = FIRST_WAIT_S
        while not worker.removed:
            worker.probe_soon.clear()
            path = await self._probe(worker, path)
            settled = worker.life is Life.UP
            try:
                async with asyncio.timeout(self._settings.health_interval_s if settled else wait_s):
                    await worker.probe_soon.wait()
            except TimeoutError:
                pass
            wait_s = FIRST_WAIT_S if settled else min(2 * wait_s, self._settings.health_interval_s)

    async def _probe(self, worker: Worker, path: str) -> str:
        """One probe; the path for the next one."""
        try:
            answer = await call(worker.url, "GET", path, timeout_s=self._settings.health_timeout_s)
        except Refused as error:
            self._workers.gone(worker, str(error))
            return PROBE_PATH
        except (TimeoutError, ConnectTimeout):
            limit_s = self._settings.health_timeout_s
            self._workers.probe_failed(worker, f"GET {path} was not answered within {limit_s:g} s", timed_out=True)
            return path
        except (NotOpened, UpstreamError) as error:
            self._workers.probe_failed(worker, f"GET {path}: {error}")
            return path
        if 200 <= answer.status < 300:
            self._workers.probe_answered(worker)
        elif path == PROBE_PATH and answer.status in (404, 405, 501):
            return await self._probe(worker, FALLBACK_PATH)
        else:
            self._workers.probe_failed(worker, f"GET {path} was answered {answer.status}", refused=True)
        return path
