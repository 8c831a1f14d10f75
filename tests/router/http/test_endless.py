"""What never ends and is no body: trailers, chunk extensions. Neither side may make the router keep or read it all."""

import asyncio
import contextlib

import pytest

from tests.router.conftest import Running, StartWorker
from tests.router.fake_worker import Seen
from tests.router.raw_client import exchange, post
from tests.router.waiting import eventually

CHUNKED = b"POST /x HTTP/1.1\r\nhost: r\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = pytest.mark.parametrize("begin", [b"2\r\n{}\r\n0\r\nx: ", b"2\r\n{}\r\n2;name="])
PIECE = b"a" * 65536
MANY = 200


async def pour(writer: asyncio.StreamWriter) -> int:
    """Send pieces until the other side has enough, or for long; how many."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < MANY:
            writer.write(PIECE)
            await writer.drain()
            sent += 1
    return sent


@ENDLESS
async def test_of_a_client(router: Running, start_worker: StartWorker, begin: bytes) -> None:
    worker = await start_worker()
    await router.add(worker)
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(CHUNKED + begin)
        assert await pour(writer) < MANY
        with contextlib.suppress(ConnectionError):
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 431")
        writer.transport.abort()


@ENDLESS
async def test_of_a_worker(router: Running, start_worker: StartWorker, begin: bytes) -> None:
    poured: list[int] = []

    async def endless(seen: Seen) -> None:
        await seen.send(ANSWER + begin)
        poured.append(await pour(seen.writer))

    await router.add(await start_worker(endless))
    answer = await exchange(router.port, post(b"/x"))
    assert answer.status == 200 and not answer.body.endswith(b"0\r\n\r\n")
    await eventually(lambda: bool(poured), "the worker was cut off")
    assert poured[0] < MANY


async def test_many_small_chunks_with_sizes_that_come_alone_are_no_such_thing(
    router: Running, start_worker: StartWorker
) -> None:
    async def drip(seen: Seen) -> None:
        await seen.send(ANSWER)
        for _ in range(300):
            await seen.send(b"1;" + b"a" * 500 + b"\r\n")
            await asyncio.sleep(0)
            await seen.send(b"x\r\n")
        await seen.send(b"0\r\n\r\n")

    await router.add(await start_worker(drip))
    answer = await exchange(router.port, post(b"/x"))
    assert answer.body.count(b"x") == 300 and answer.body.endswith(b"0\r\n\r\n")
