"""Random bytes and mutated requests: never a crash, never a hang, never a request that was not sent."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.main import listening
from services.router.workers.workers import State
from tests.router.conftest import QUICK
from tests.router.fake_worker import FakeWorker
from tests.router.raw_client import exchange, post
from tests.router.waiting import eventually

NAMES = (b"content-length", b"transfer-encoding", b"connection", b"expect", b"host", b"x-a", b"upgrade", b"te")
VALUES = (b"0", b"5", b"chunked", b"close", b"keep-alive", b"100-continue", b"gzip, chunked", b"h", b"upgrade", b"")
ENDS = (b"\r\n", b"\n", b"\r", b"\r\n ", b"")
ALLOWED = (b"/ok", b"/smuggled-ok")
"""Paths that a request line can have here."""

headers = st.tuples(st.sampled_from(NAMES), st.sampled_from((b": ", b":", b" : ", b"")), st.sampled_from(VALUES))
lines = st.lists(st.tuples(headers, st.sampled_from(ENDS)), max_size=6)
bodies = st.sampled_from((b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"0\r\n\r\n", b"zz\r\n", b"\x00" * 20))
methods = st.sampled_from((b"GET", b"POST", b"HEAD", b"OPTIONS", b"get", b""))
versions = st.sampled_from((b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1 ", b""))


@st.composite
def almost_requests(draw: st.DrawFn) -> bytes:
    """Requests with something wrong, or not."""
    head = draw(methods) + b" /ok " + draw(versions) + draw(st.sampled_from(ENDS))
    if draw(st.booleans()):
        head += b"host: h\r\n"
    for (name, colon, value), end in draw(lines):
        head += name + colon + value + end
    data = head + draw(st.sampled_from((b"\r\n", b"\n", b""))) + draw(bodies)
    if draw(st.booleans()):
        where = draw(st.integers(0, max(0, len(data) - 1)))
        data = data[:where] + draw(st.binary(max_size=3)) + data[where + 1 :]
    return data


inputs = st.one_of(almost_requests(), st.binary(max_size=300), st.lists(almost_requests(), max_size=4).map(b"".join))


@asynccontextmanager
async def router_and_worker() -> AsyncGenerator[tuple[int, FakeWorker]]:
    told = replace(QUICK, health_interval_s=60.0, idle_timeout_s=0.3, client_head_timeout_s=0.3)
    worker = await FakeWorker().start()
    async with listening(told, host="127.0.0.1", http_port=0, grpc_port=0, drain_s=1.0) as running:
        added = running.router.add(worker.url, admit=True)
        await eventually(lambda: added.state is State.READY, "the worker is ready")
        yield int(running.http.rsplit(":", 1)[1]), worker
        assert added.in_flight == 0
    await worker.die()


async def throw(port: int, data: bytes, cuts: list[int]) -> bytes:
    """Send bytes in pieces, end the sending, and read to the end of the connection."""
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                writer.write(data[start:end])
                await asyncio.sleep(0)
            writer.write_eof()
            return await reader.read(-1)
        except ConnectionError:
            return b""
        finally:
            writer.close()


def check(worker: FakeWorker, said: bytes) -> None:
    assert not said or said.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in said.split(b"\r\n")[0]
    for seen in worker.requests:  # each was parsed strictly by the fake worker, one by one
        assert seen.line.split(b" ")[1:] == [b"/ok", b"HTTP/1.1"]
        assert len(seen.header(b"host")) == 1
        assert len(seen.header(b"content-length")) + len(seen.header(b"transfer-encoding")) <= 1


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=st.lists(inputs, min_size=20, max_size=40), seed=st.integers(0, 2**32))
def test_no_bytes_break_the_router_or_reach_a_worker_as_another_request(batch: list[bytes], seed: int) -> None:
    chance = random.Random(seed)

    async def run() -> None:
        async with router_and_worker() as (port, worker):
            cuts = [sorted(chance.sample(range(len(data)), min(len(data), chance.randint(0, 3)))) for data in batch]
            for said in await asyncio.gather(*map(throw, [port] * len(batch), batch, cuts)):
                check(worker, said)
            before = len(worker.requests)
            answer = await exchange(port, post(b"/ok", b"{}"))
            assert answer.status == 200 and len(worker.requests) == before + 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def requests_of(numbers: list[int]) -> tuple[bytes, list[bytes]]:
    """Good requests in a row, and their bodies."""
    data, sent = b"", []
    for number in numbers:
        body = b"%d" % number * (number % 7)
        if number % 3 == 0:
            chunks = b"".join(b"%x\r\n%b\r\n" % (1, bytes([byte])) for byte in body) + b"0\r\n\r\n"
            data += b"POST /ok HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" + chunks
        else:
            data += b"POST /ok HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        sent.append(body)
    return data, sent


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(numbers=st.lists(st.integers(0, 999), min_size=1, max_size=20), seed=st.integers(0, 2**32))
def test_good_requests_in_any_pieces_stay_what_they_are(numbers: list[int], seed: int) -> None:
    chance = random.Random(seed)
    data, sent = requests_of(numbers)
    cuts = sorted(chance.sample(range(len(data)), min(len(data), chance.randint(0, 10))))

    async def run() -> None:
        async with router_and_worker() as (port, worker):
            said = await throw(port, data + post(b"/ok", b"last"), cuts)
            assert said.count(b"HTTP/1.1 200 ") == len(numbers) + 1
            assert [seen.body for seen in worker.requests] == [*sent, b"last"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
