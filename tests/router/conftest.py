"""A router in this process, on real sockets, with quick probes; and fake workers that end with the test."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import aiohttp
import pytest
import uvloop

from furlong.config import RunConfig
from services.router.main import Listening, listening
from services.router.settings import RouterSettings
from services.router.workers.workers import State
from tests.router.fake_worker import FakeWorker, Handler, answer_ok
from tests.router.waiting import eventually

QUICK = replace(
    RouterSettings.of(RunConfig()),
    health_interval_s=0.05,
    health_timeout_s=0.3,
    connect_timeout_s=1.0,
    first_byte_timeout_s=5.0,
    queue_timeout_s=5.0,
    health_busy_grace_s=2.0,
    breaker_failures=3,
    breaker_pause_s=0.5,
)

StartWorker = Callable[..., Awaitable[FakeWorker]]


@dataclass
class Running:
    """A router under test and a client for it."""

    listening: Listening
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.listening.http

    @property
    def grpc(self) -> str:
        assert self.listening.grpc is not None
        return self.listening.grpc

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def add(self, worker: FakeWorker, *, until_ready: bool = True) -> str:
        """Register a worker; its id."""
        async with self.http.post(f"{self.url}/workers", json={"url": worker.url}) as answer:
            assert answer.status == 202, await answer.text()
            worker_id = (await answer.json())["id"]
        if until_ready:
            await self.until_state(worker_id, State.READY)
        return worker_id

    async def until_state(self, worker_id: str, state: State) -> None:
        def reached() -> bool:
            worker = self.listening.router.workers.find(worker_id)
            return worker is not None and worker.state is state

        await eventually(reached, f"worker {worker_id} is {state.name}")

    async def views(self) -> list[dict[str, object]]:
        async with self.http.get(f"{self.url}/workers") as answer:
            return (await answer.json())["workers"]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], object]]:
    """The loop that the service runs on."""
    return {"uvloop": uvloop.new_event_loop}


StartRouter = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(host: str = "127.0.0.1", **changes: object) -> Running:
            settings = replace(QUICK, **changes)  # type: ignore[arg-type]
            running = await stack.enter_async_context(
                listening(settings, host=host, http_port=0, grpc_port=0, drain_s=1.0)
            )
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout(20)
            )
            return Running(running, await stack.enter_async_context(session))

        yield start


@pytest.fixture
async def router(start_router: StartRouter) -> Running:
    return await start_router()


@pytest.fixture
async def start_worker() -> AsyncGenerator[StartWorker]:
    workers: list[FakeWorker] = []

    async def start(handler: Handler = answer_ok, *, host: str = "127.0.0.1") -> FakeWorker:
        worker = FakeWorker(handler)
        worker.host = host
        workers.append(worker)
        return await worker.start()

    yield start
    for worker in workers:
        await worker.die()
