"""Every wait has a limit, and who let it run out is told from who did not."""

import asyncio
import time

import aiohttp
import pytest

from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import Seen
from tests.router.raw_client import exchange, get, post
from tests.router.waiting import eventually


async def hang(seen: Seen) -> None:
    await asyncio.Event().wait()


async def send_slowly(port: int, data: bytes, *, pause_s: float) -> bytes:
    """Send byte by byte until the router answers or closes; what it said."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = asyncio.create_task(reader.read(-1))
        try:
            for number in range(len(data)):
                writer.write(data[number : number + 1])
                await asyncio.wait([answer], timeout=pause_s)
                if answer.done():
                    break
        except ConnectionError:
            pass
        said = await answer
        writer.close()
        return said


async def test_a_head_that_drips_is_cut_off(start_router: StartRouter) -> None:
    router = await start_router(client_head_timeout_s=0.4)
    started = time.monotonic()
    said = await send_slowly(router.port, get(b"/healthz", extra=b"x-a: %s\r\n" % (b"a" * 500)), pause_s=0.02)
    assert said.startswith(b"HTTP/1.1 408") and 0.3 < time.monotonic() - started < 2


async def test_a_body_that_drips_may_take_its_time(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(client_head_timeout_s=0.2, idle_timeout_s=0.4)
    worker = await start_worker()
    await router.add(worker)
    head = b"POST /x HTTP/1.1\r\nhost: r\r\nconnection: close\r\ncontent-length: 30\r\n\r\n"
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(head)
        for _ in range(30):
            writer.write(b"x")
            await asyncio.sleep(0.03)
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("length", [100, 1_000_000])
async def test_a_body_that_stops_is_the_clients_fault(
    start_router: StartRouter, start_worker: StartWorker, length: int
) -> None:
    """Whether it was still being gathered, or on its way to the worker already."""
    router = await start_router(idle_timeout_s=0.3)
    worker = await start_worker()
    await router.add(worker)
    answer = await exchange(
        router.port, b"POST /x HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\nhalf" % length, timeout_s=5
    )
    assert answer.status == 408 and b"client_stalled" in answer.body
    assert [(view["in_flight"], view["num_failures"]) for view in await router.views()] == [(0, 0)]


async def test_an_answer_that_does_not_begin(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(first_byte_timeout_s=0.3)
    worker = await start_worker(hang)
    await router.add(worker)
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == 504 and b"worker_late" in answer.body and worker.url.encode() in answer.body
    assert [(view["in_flight"], view["num_failures"]) for view in await router.views()] == [(0, 1)]


async def test_an_answer_that_stops_is_broken_off(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(idle_timeout_s=0.3)

    async def stop(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
        await hang(seen)

    await router.add(await start_worker(stop))
    async with router.http.post(f"{router.url}/generate") as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert [(view["in_flight"], view["num_failures"]) for view in await router.views()] == [(0, 1)]


async def test_an_answer_that_goes_on_is_not_idle(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(idle_timeout_s=0.3, first_byte_timeout_s=0.3)

    async def drip(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(10):
            await seen.send(b"1\r\nx\r\n")
            await asyncio.sleep(0.1)
        await seen.send(b"0\r\n\r\n")

    await router.add(await start_worker(drip))
    async with router.http.post(f"{router.url}/generate") as answer:
        assert await answer.read() == b"x" * 10


@pytest.mark.parametrize("begins", [False, True])
async def test_the_total_limit_ends_a_request_wherever_it_is(
    start_router: StartRouter, start_worker: StartWorker, *, begins: bool
) -> None:
    router = await start_router(total_timeout_s=0.4)

    async def slow(seen: Seen) -> None:
        if begins:
            await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
        await hang(seen)

    await router.add(await start_worker(slow))
    answer = await exchange(router.port, post(b"/generate"), timeout_s=3)
    if begins:
        assert answer.status == 200 and not answer.body.endswith(b"0\r\n\r\n")
    else:
        assert answer.status == 504 and b"total_timeout" in answer.body
    assert [view["in_flight"] for view in await router.views()] == [0]


async def test_the_total_limit_holds_in_the_queue(start_router: StartRouter) -> None:
    router = await start_router(total_timeout_s=0.3)
    answer = await exchange(router.port, post(b"/generate"), timeout_s=3)
    assert answer.status == 504 and b"total_timeout" in answer.body


async def test_a_client_that_takes_nothing_is_cut_off_and_the_worker_not_blamed(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(idle_timeout_s=0.4)
    piece = b"x" * 65536

    async def flood(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1000 * len(piece)))
        for _ in range(1000):
            await seen.send(piece)

    await router.add(await start_worker(flood))
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=65536)
    writer.write(post(b"/generate"))
    await reader.readuntil(b"\r\n\r\n")
    workers = router.listening.router.workers
    await eventually(lambda: [worker.in_flight for worker in workers.all()] == [0], "the worker is free again")
    assert [view["num_failures"] for view in await router.views()] == [0]
    writer.close()


async def test_a_worker_that_takes_no_more_of_a_body(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(idle_timeout_s=0.4)

    async def read_nothing(seen: Seen) -> None:
        seen.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await hang(seen)

    worker = await start_worker(read_nothing)
    worker.read_bodies = False
    await router.add(worker)
    body = b"x" * 40_000_000
    async with router.http.post(f"{router.url}/generate", data=body) as answer:
        assert answer.status == 504 and "took no more of the body" in await answer.text()


async def test_a_request_is_tried_no_more_often_than_told(start_router: StartRouter, start_worker: StartWorker) -> None:
    async def die(seen: Seen) -> None:
        seen.writer.close()

    router = await start_router(max_tries=2)
    workers = [await start_worker(die) for _ in range(4)]
    for worker in workers:
        await router.add(worker)
    answer = await exchange(router.port, get(b"/x"))
    assert answer.status == 502 and sorted(len(worker.requests) for worker in workers) == [0, 0, 1, 1]


async def test_the_routers_own_paths_take_no_large_body(start_router: StartRouter) -> None:
    router = await start_router(max_control_body_bytes=200_000)
    body = b" " * 300_000
    answer = await exchange(router.port, post(b"/workers", body))
    assert answer.status == 413 and b"body_too_large" in answer.body
    pieces = b"".join(b"186a0\r\n%s\r\n" % (b" " * 100_000) for _ in range(4)) + b"0\r\n\r\n"
    chunked = b"POST /workers HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n" + pieces
    assert (await exchange(router.port, chunked)).status == 413
