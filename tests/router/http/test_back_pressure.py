"""Large bodies both ways: whoever is slow slows the other side, and memory stays small."""

import asyncio
import gc
import hashlib
import resource
import tracemalloc

import pytest

from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import Seen
from tests.router.raw_client import post

PIECE = bytes(range(256)) * 256
NUM_PIECES = 1600  # 100 MB
DIGEST = hashlib.blake2b(PIECE * 16).digest()
MAX_HELD_BYTES = 4_000_000


async def swallow(seen: Seen) -> None:
    """Read a body by length or chunks without keeping it; answer with its size and digest."""
    left, digest = int(seen.header(b"content-length")[0]), hashlib.blake2b()
    size = left
    while left:
        piece = await seen.reader.read(min(left, 1 << 20))
        assert piece
        digest.update(piece)
        left -= len(piece)
    await seen.answer(b"%d %s" % (size, digest.hexdigest().encode()))


async def flood(seen: Seen) -> None:
    await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(NUM_PIECES):
        await seen.send(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
    await seen.send(b"0\r\n\r\n")


async def test_100_mb_up_in_constant_memory(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(swallow)
    worker.read_bodies = False
    await router.add(worker)
    head = b"POST /generate HTTP/1.1\r\nhost: r\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    whole = hashlib.blake2b()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(head % (len(PIECE) * NUM_PIECES))
        for _ in range(NUM_PIECES):
            whole.update(PIECE)
            writer.write(PIECE)
            await writer.drain()
        answer = await reader.read(-1)
        writer.close()
    assert answer.endswith(b"%d %s" % (len(PIECE) * NUM_PIECES, whole.hexdigest().encode()))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KiB: all four sides are in here


async def test_100_mb_down_in_constant_memory(router: Running, start_worker: StartWorker) -> None:
    await router.add(await start_worker(flood))
    size, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with router.http.post(f"{router.url}/generate") as answer:
        async for piece in answer.content.iter_any():
            size += len(piece)
    assert size == len(PIECE) * NUM_PIECES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_worker_that_reads_nothing_stops_the_client(
    start_router: StartRouter, start_worker: StartWorker, *, chunked: bool
) -> None:
    router = await start_router()

    async def read_nothing(seen: Seen) -> None:
        seen.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    worker = await start_worker(read_nothing)
    worker.read_bodies = False
    await router.add(worker)
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: 1000000000"
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"POST /generate HTTP/1.1\r\nhost: r\r\n" + framing + b"\r\n\r\n")
    gc.collect()
    tracemalloc.start()
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 200_000_000:
            writer.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE) if chunked else PIECE)
            async with asyncio.timeout(0.5):
                await writer.drain()
            sent += len(PIECE)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sent < 30_000_000 and held < MAX_HELD_BYTES  # sockets hold the most; we, two buffers
    writer.transport.abort()


async def test_many_small_chunks_are_not_many_objects(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    chunks = b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n"
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /x HTTP/1.1\r\nhost: r\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert worker.requests[0].body == b"x" * 200_000


async def test_bodies_of_every_size_around_the_buffers_arrive(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(lambda seen: seen.answer(seen.body))
    await router.add(worker)
    for size in (0, 1, 65535, 65536, 65537, 262143, 262144, 262145, 700_001):
        body = (PIECE * 11)[:size]
        async with router.http.post(f"{router.url}/generate", data=body) as answer:
            assert await answer.read() == body
        raw = post(b"/generate", body)
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(raw)
            assert (await reader.read(-1)).endswith(b"\r\n\r\n" + body)
            writer.close()


async def test_a_client_that_asks_ahead_and_reads_nothing_gets_no_more_begun(
    router: Running, start_worker: StartWorker
) -> None:
    worker = await start_worker(lambda seen: seen.answer(PIECE * 16))
    await router.add(worker)
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=65536)
        writer.write(b"GET /x HTTP/1.1\r\nhost: r\r\n\r\n" * 99 + post(b"/last"))
        before = -1
        while before != len(worker.requests):  # until it goes on no more
            before = len(worker.requests)
            await asyncio.sleep(0.2)
        assert 0 < before < 30
        size = 0
        while piece := await reader.read(1 << 20):
            size += len(piece)
        writer.close()
    assert len(worker.requests) == 100 and size > 100 * 16 * len(PIECE)
