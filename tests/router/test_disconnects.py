"""A client that goes away takes its request with it, at once."""

import asyncio
import gc
import socket
import struct

import pytest

from services.router.http.client import ClientConnection
from tests.router.conftest import Running, StartWorker
from tests.router.fake_worker import FakeWorker, Seen, read_body, wait_gone
from tests.router.raw_client import exchange, post
from tests.router.waiting import eventually

NOTICE_S = 0.5


async def leave_after(router: Running, worker: FakeWorker, request: bytes, *, read_first: bool = False) -> Seen:
    """Send a request, wait until the worker has it, go away; the request as the worker saw it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(request)
    seen = (await worker.arrived())[0]
    if read_first:
        await reader.readuntil(b"data: 1\n\n")
    writer.close()
    async with asyncio.timeout(NOTICE_S):
        await seen.gone.wait()
    await eventually(lambda: in_flight(router) == [0], "the worker is free again")
    return seen


def in_flight(router: Running) -> list[int]:
    return [worker.in_flight for worker in router.listening.router.workers.all()]


def clients(router: Running) -> list[ClientConnection]:
    return [found for found in gc.get_objects() if isinstance(found, ClientConnection) and found.exchange is not None]


async def test_leaving_while_waiting_for_the_first_byte(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(wait_gone)
    await router.add(worker)
    await leave_after(router, worker, post(b"/generate"))
    assert (await router.views())[0]["num_failures"] == 0  # the client's doing


async def test_leaving_amid_a_stream(router: Running, start_worker: StartWorker) -> None:
    async def stream(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await wait_gone(seen)

    worker = await start_worker(stream)
    await router.add(worker)
    await leave_after(router, worker, post(b"/generate"), read_first=True)


async def test_leaving_amid_an_upload(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(wait_gone)
    worker.read_bodies = False
    await router.add(worker)
    await leave_after(router, worker, b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 1000000\r\n\r\nhalf")


@pytest.mark.parametrize("reset", [True, False])
async def test_leaving_while_nothing_is_read(router: Running, start_worker: StartWorker, reset: bool) -> None:
    """The end of a client that sends more than anybody takes stands behind what it sent."""

    async def read_nothing(seen: Seen) -> None:
        await asyncio.Event().wait()

    worker = await start_worker(read_nothing)
    worker.read_bodies = False
    await router.add(worker)
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 100000000\r\n\r\n")
    writer.write(bytes(100_000_000))
    await worker.arrived()
    await eventually(lambda: any(client.paused for client in clients(router)), "nobody takes the body")
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
    await eventually(lambda: in_flight(router) == [0], "the worker is free again", timeout_s=1 if reset else 4)


async def test_who_uploads_to_a_slow_worker_is_not_taken_for_gone(router: Running, start_worker: StartWorker) -> None:
    go = asyncio.Event()

    async def read_later(seen: Seen) -> None:
        await go.wait()
        seen.body = await read_body(seen)
        await seen.answer()

    worker = await start_worker(read_later)
    worker.read_bodies = False
    await router.add(worker)
    body = bytes(20_000_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(post(b"/generate", body))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"  # is it there?
    go.set()
    answer = await reader.read(-1)
    writer.close()
    assert answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").startswith(b"HTTP/1.1 200")
    assert worker.requests[0].body == body


async def test_leaving_the_queue(router: Running, start_worker: StartWorker) -> None:
    workers = router.listening.router.workers
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(post(b"/generate"))
    await eventually(lambda: workers.num_waiting() == 1, "the request waits")
    writer.close()
    await eventually(lambda: workers.num_waiting() == 0, "it waits no more", timeout_s=NOTICE_S)
    worker = await start_worker()
    await router.add(worker)
    assert (await exchange(router.port, post(b"/generate"))).status == 200 and len(worker.requests) == 1


async def test_a_client_that_reads_slowly_slows_the_worker_and_not_the_memory(
    router: Running, start_worker: StartWorker
) -> None:
    sent = 0
    piece = b"x" * 65536

    async def flood(seen: Seen) -> None:
        nonlocal sent
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1000 * len(piece)))
        for _ in range(1000):
            await seen.send(piece)
            sent += len(piece)

    await router.add(await start_worker(flood))
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=65536)
    writer.write(post(b"/generate"))
    await reader.readuntil(b"\r\n\r\n")
    before = -1
    while before != sent:  # until it moves no more
        before = sent
        await asyncio.sleep(0.2)
    assert sent < 30_000_000  # what socket buffers and one buffer of each hop hold, not the whole 65 MB
    writer.close()
    await eventually(lambda: in_flight(router) == [0], "the worker is free again")
