"""A router whose machine gives it no more files says so, and blames no worker for it."""

import asyncio
import contextlib
import resource
from collections.abc import Generator
from dataclasses import replace

from services.router.http.server import MIN_REFUSED
from services.router.main import _within_files
from services.router.workers.workers import State
from tests.router.conftest import QUICK, Running, StartRouter, StartWorker
from tests.router.raw_client import exchange, post
from tests.router.waiting import eventually


@contextlib.contextmanager
def no_more_files() -> Generator[None]:
    """Nothing can be opened in this process while inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_files_requests_are_503_and_workers_stay_as_they_are(
    router: Running, start_worker: StartWorker
) -> None:
    worker_id = await router.add(await start_worker())
    worker = router.listening.router.workers.find(worker_id)
    assert worker is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    with no_more_files():
        for _ in range(5):
            writer.write(post(b"/generate").replace(b"connection: close\r\n", b""))
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 503")
        for _ in range(6):  # more probes than would take it out
            worker.probe_soon.set()
            await eventually(lambda: not worker.probe_soon.is_set(), "it is looked at")
            await asyncio.sleep(0.01)
    writer.close()
    assert (worker.state, worker.num_failures, worker.breaker.is_open) == (State.READY, 0, False)
    assert (await exchange(router.port, post(b"/generate"))).status == 200
    await eventually(lambda: worker.in_flight == 0, "it answers nothing")


async def test_unused_connections_of_clients_leave_room_for_others(start_router: StartRouter) -> None:
    router = await start_router(max_connections=32)
    refused = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(64)]
    async with asyncio.timeout(5):
        ends = await asyncio.gather(*(reader.read(-1) for reader, _ in refused[32:]), return_exceptions=True)
    assert sum(isinstance(end, bytes) and b"too_many_connections" in end for end in ends) == MIN_REFUSED
    for _, writer in refused:
        writer.close()


def test_connections_are_limited_to_what_files_allow() -> None:
    assert _within_files(replace(QUICK, max_connections=1000), 256).max_connections == 192
    assert _within_files(replace(QUICK, max_connections=1000, processes=2), 256).max_connections == 384
    assert _within_files(replace(QUICK, max_connections=100), 256).max_connections == 100
    assert _within_files(QUICK, resource.RLIM_INFINITY) is QUICK
