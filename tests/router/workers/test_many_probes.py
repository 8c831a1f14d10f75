"""Probing of many workers: one server of loopback addresses, each of which is a worker."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from services.router.router import Router
from services.router.workers import health
from services.router.workers.worker import State
from tests.router.waiting import eventually
from tests.router.workers.clock import SETTINGS


class Host:
    """Answers probes on every address of 127.0.0.0/8, and notes when; those in `hung` get no answer."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.hung: set[str] = set()
        self.open = Counter[str]()
        self.most_open = 0
        self.port = 0
        self._never = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("sockname")[0]
        self.open["all"] += 1
        self.most_open = max(self.most_open, self.open["all"])
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.times.setdefault(address, []).append(asyncio.get_running_loop().time())
            if address in self.hung:
                await reader.read()  # until the router gives up
                return
            await asyncio.sleep(0)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.open["all"] -= 1
            writer.close()

    def url(self, number: int) -> str:
        return f"http://127.1.{number // 250}.{number % 250 + 1}:{self.port}"


@contextlib.asynccontextmanager
async def many(**changes: object) -> AsyncGenerator[tuple[Host, Router]]:
    host = Host()
    server = await asyncio.start_server(host, "0.0.0.0", 0, backlog=1024)
    host.port = server.sockets[0].getsockname()[1]
    router = Router(replace(SETTINGS, **changes))  # type: ignore[arg-type]
    try:
        yield host, router
    finally:
        await router.close()
        server.close()


async def test_a_thousand_workers_are_proved_quickly_but_not_all_at_once() -> None:
    async with many(health_interval_s=30.0) as (host, router):
        for number in range(1000):
            router.add(host.url(number), admit=True)
        await eventually(lambda: router.workers.num_ready() == 1000, "a thousand are ready")
        assert host.most_open <= health.MAX_AT_ONCE
        assert router.observer.probes_good >= 1000


async def test_their_later_probes_are_spread_over_the_interval() -> None:
    async with many(health_interval_s=2.0) as (host, router):
        for number in range(200):
            router.add(host.url(number), admit=True)
        await eventually(lambda: sum(len(times) > 1 for times in host.times.values()) == 200, "all were probed twice")
        second = sorted(times[1] for times in host.times.values())
        busiest = max(sum(start <= each < start + 0.2 for each in second) for start in second)
        assert busiest < 100, "an even spread has 20 in each tenth of the interval"


async def test_workers_that_hang_do_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_AT_ONCE", 4)
    async with many(health_interval_s=0.05, health_timeout_s=2.0) as (host, router):
        well = router.add(host.url(0), admit=True)
        await eventually(lambda: well.state is State.READY, "the first is ready")
        hung = [router.add(host.url(number), admit=True) for number in range(1, 40)]
        host.hung = {worker.url.host for worker in hung}
        await eventually(
            lambda: all(worker.bad_probes for worker in hung[:4]),
            "all places for newcomers were taken by some that hang",
        )
        gaps = [b - a for a, b in zip(host.times[well.url.host], host.times[well.url.host][1:], strict=False)]
        assert len(gaps) > 5 and max(gaps) < 1.5, "less than what one that hangs takes"


async def test_the_observer_is_told_of_good_and_bad_probes() -> None:
    async with many(health_interval_s=0.05, health_timeout_s=0.1) as (host, router):
        worker = router.add(host.url(0), admit=True)
        await eventually(lambda: router.observer.probes_good > 1, "good probes are counted")
        host.hung = {worker.url.host}
        await eventually(lambda: router.observer.probes_bad > 1, "bad ones too")
