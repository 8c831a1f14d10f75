"""Workers named by host names: nobody waits for the names of others, and nobody who runs depends on a name service."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from services.router.http import connections
from services.router.http.connections import NotOpened, open_connection
from services.router.http.names import KEEP_S, Names
from services.router.workers.urls import parse_worker_url
from services.router.workers.workers import State
from tests.router.conftest import Running, StartWorker
from tests.router.raw_client import exchange, post


class Service:
    """A name service."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self.is_out = False
        self.silent = threading.Event()
        """Set at the end: until then names that begin with `dead` are not answered."""
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[object]:
        self.asked.append(host)
        if host.startswith("dead"):
            self.silent.wait(20)
        if self.is_out or host.startswith("dead"):
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, port))]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service()
    monkeypatch.setattr(connections, "NAMES", Names(made))  # type: ignore[arg-type]
    yield made
    made.silent.set()


async def test_names_that_nobody_answers_for_hold_up_no_other(
    router: Running, start_worker: StartWorker, service: Service
) -> None:
    workers = router.listening.router
    for number in range(12):
        workers.add(f"http://dead{number}.test:1", admit=True)
    worker = await start_worker()
    found = workers.add(f"http://good.test:{worker.port}", admit=True)
    await router.until_state(found.worker_id, State.READY)
    started = time.monotonic()
    for _ in range(5):
        assert (await exchange(router.port, post(b"/x"))).status == 200
        await asyncio.sleep(0.01)  # so that the next one has a fresh connection
    assert time.monotonic() - started < 1


async def test_who_is_known_is_reached_while_the_name_service_is_out(
    router: Running, start_worker: StartWorker, service: Service
) -> None:
    worker = await start_worker()
    found = router.listening.router.add(f"http://good.test:{worker.port}", admit=True)
    await router.until_state(found.worker_id, State.READY)
    service.is_out = True
    connections.NAMES._clock = lambda: time.monotonic() + 2 * KEEP_S  # what is known is old
    assert (await exchange(router.port, post(b"/x"))).status == 200
    assert found.state is State.READY and found.num_failures == 0


async def test_a_name_is_asked_for_once_at_a_time_and_again_when_it_is_old(service: Service) -> None:
    now = 0.0
    names = Names(service, clock=lambda: now)  # type: ignore[arg-type]
    await asyncio.gather(*(names.addresses("h", 80) for _ in range(10)))
    assert service.asked == ["h"]
    now = 2 * KEEP_S
    service.address = "127.0.0.2"
    assert [found.address for found in await names.addresses("h", 80)] == [("127.0.0.2", 80)]
    assert service.asked == ["h", "h"]


async def test_a_name_that_leads_to_a_refused_address_is_not_connected_to(service: Service) -> None:
    service.address = "169.254.169.254"
    with pytest.raises(NotOpened, match="link-local"):
        await open_connection(parse_worker_url("http://cloud.test"), timeout_s=1)


async def test_an_unknown_name_is_told(service: Service) -> None:
    service.is_out = True
    with pytest.raises(NotOpened, match="no answer"):
        await open_connection(parse_worker_url("http://nobody.test"), timeout_s=1)


async def test_a_name_service_that_breaks_is_asked_again() -> None:
    said: list[list[object]] = []

    def look_up(host: str, port: int) -> list[object]:
        said.append([host, port])
        if len(said) == 1:
            raise MemoryError
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    names = Names(look_up)  # type: ignore[arg-type]
    async with asyncio.timeout(5.0):
        with pytest.raises(OSError, match="MemoryError"):
            await names.addresses("worker", 1)
        assert [known.address for known in await names.addresses("worker", 1)] == [("127.0.0.1", 1)]
