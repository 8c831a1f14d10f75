"""Reads Prometheus endpoints of engines, each in a task of its own, at an even pace. Never waits for one for long.

A dead endpoint costs one warning, is asked less and less often, and is told again when it is back.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import aiohttp
import structlog

from furlong.config.destinations import scraped
from services.metrics.engines import exposition
from services.metrics.engines.exposition import Exposition
from services.metrics.tailing.tailer import Sample

log = structlog.get_logger()

MAX_TIMEOUT_S = 10.0
MAX_BACK_OFF = 16
"""Intervals until a dead endpoint is asked again, at most."""
_HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}


@dataclass
class Endpoint:
    """One endpoint and how it is."""

    instance: str
    url: str
    num_readings: int = 0
    num_failures: int = 0
    failing: str = ""
    """Why the last reading failed. Empty: it did not."""
    failed_in_row: int = 0
    last: Exposition | None = None


def read_endpoint(given: str) -> Endpoint:
    """`URL` or `INSTANCE=URL`. Raises ValueError saying what is wrong."""
    return Endpoint(*scraped(given))


class Scraper:
    """All endpoints."""

    def __init__(self, urls: Sequence[str], *, interval_s: float, take: Callable[[Sample], None]) -> None:
        self.endpoints = [read_endpoint(url) for url in urls]
        self._interval_s, self._take = max(1.0, interval_s), take
        self.timeout = aiohttp.ClientTimeout(total=min(MAX_TIMEOUT_S, self._interval_s * 0.8))

    @contextlib.asynccontextmanager
    async def running(self, watch: Callable[["asyncio.Task[object]"], object]) -> AsyncGenerator[None]:
        """Reads while entered. watch: told of each task."""
        async with aiohttp.ClientSession(trust_env=False, timeout=self.timeout, headers=_HEADERS) as session:
            tasks = [asyncio.create_task(self._follow(session, e), name=f"scrape {e.instance}") for e in self.endpoints]
            for task in tasks:
                watch(task)
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        while True:
            await self.read_once(session, endpoint)
            skipped = min(MAX_BACK_OFF, 2**endpoint.failed_in_row) - 1 if endpoint.failed_in_row > 1 else 0
            if skipped:
                skipped = random.randint((skipped + 1) // 2, skipped)
            await asyncio.sleep(self._until_next_s(time.time()) + skipped * self._interval_s)

    def _until_next_s(self, now_s: float) -> float:
        """In the middle of an interval, so that each has one reading."""
        return self._interval_s - (now_s - self._interval_s / 2) % self._interval_s

    async def read_once(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> bool:
        """One reading. False: it failed, and is counted."""
        try:
            text = await _get(session, endpoint.url)
            read = await asyncio.to_thread(exposition.parse, text, time.monotonic())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, IndexError, KeyError) as error:
            self._failed(endpoint, f"{type(error).__name__}: {error}")
            return False
        if endpoint.failed_in_row:
            log.info("scrape_back", endpoint=endpoint.instance, url=endpoint.url, num_failed=endpoint.failed_in_row)
        values = exposition.values(read, endpoint.last)
        endpoint.last, endpoint.failing, endpoint.failed_in_row = read, "", 0
        endpoint.num_readings += 1
        if values:
            self._take(Sample(endpoint.instance, time.time(), values))
        return True

    def _failed(self, endpoint: Endpoint, why: str) -> None:
        if not endpoint.failed_in_row:
            log.warning("scrape_failed", endpoint=endpoint.instance, url=endpoint.url, error=why)
        endpoint.failing = why
        endpoint.failed_in_row += 1
        endpoint.num_failures += 1


async def _get(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise ValueError(f"it answered {response.status}")
        content = bytearray()
        async for chunk in response.content.iter_chunked(256 * 1024):
            content += chunk
            if len(content) > exposition.MAX_BYTES:
                raise ValueError(f"it answered more than {exposition.MAX_BYTES} bytes")
    return content.decode("utf-8", "replace")
