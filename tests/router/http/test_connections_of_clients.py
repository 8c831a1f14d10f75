"""Client connections: kept, pipelined, half closed, of old versions, too many."""

import asyncio
import shutil
import socket

import aiohttp
import pytest

from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import Seen, wait_gone
from tests.router.raw_client import exchange, get, post

NOTICE_S = 0.5


async def answer_path(seen: Seen) -> None:
    await seen.answer(b"<" + seen.path + b">")


async def test_pipelined_answers_come_in_the_order_of_their_requests(
    router: Running, start_worker: StartWorker
) -> None:
    async def slow_first(seen: Seen) -> None:
        if seen.path == b"/0":
            await asyncio.sleep(0.05)
        await answer_path(seen)

    for _ in range(2):
        await router.add(await start_worker(slow_first))
    requests = b"".join(b"GET /%d HTTP/1.1\r\nhost: r\r\n\r\n" % number for number in range(50))
    answer = await exchange(router.port, requests + post(b"/last"))
    order = [part.split(b">")[0] for part in (answer.head + answer.body).split(b"</")[1:]]
    assert order == [b"%d" % number for number in range(50)] + [b"last"]


async def test_requests_cut_at_any_byte_are_read_all_the_same(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(answer_path)
    await router.add(worker)
    chunked = b"POST /b HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x\r\nde\r\n0\r\n\r\n"
    data = b"GET /a HTTP/1.1\r\nhost: r\r\n\r\n" + chunked + post(b"/c", b"12345")
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(len(data)):
            writer.write(data[number : number + 1])
            await asyncio.sleep(0)
        answers = await reader.read(-1)
        writer.close()
    assert [answers.count(path) for path in (b"</a>", b"</b>", b"</c>")] == [1, 1, 1]
    assert [seen.body for seen in worker.requests] == [b"", b"abcde", b"12345"]


async def test_a_flood_of_pipelined_requests_is_cut_off_in_order(router: Running, start_worker: StartWorker) -> None:
    await router.add(await start_worker(answer_path))
    answer = await exchange(router.port, b"GET /n HTTP/1.1\r\nhost: r\r\n\r\n" * 2000)
    data = answer.head + answer.body
    assert 1 <= data.count(b"</n>") <= 2000 and data.count(b"connection: close") == 1
    assert data.rindex(b"connection: close") > data.rindex(b"HTTP/1.1 200")


async def test_a_client_that_only_ended_its_sending_gets_its_answer(router: Running, start_worker: StartWorker) -> None:
    go = asyncio.Event()

    async def slow(seen: Seen) -> None:
        await go.wait()
        await seen.answer(b"late")

    worker = await start_worker(slow)
    await router.add(worker)
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post(b"/generate"))
        writer.write_eof()
        await worker.arrived()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 102")  # is anybody still there?
        go.set()
        assert (await reader.read(-1)).endswith(b"\r\n\r\nlate")
        writer.close()


async def test_a_client_that_ends_its_sending_amid_a_stream_gets_all_of_it(
    router: Running, start_worker: StartWorker
) -> None:
    go = asyncio.Event()

    async def stream(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await go.wait()
        await seen.send(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    await router.add(await start_worker(stream))
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post(b"/generate"))
        await reader.readuntil(b"data: 1\n\n\r\n")
        writer.write_eof()
        assert await reader.readexactly(1) == b"0"  # is anybody still there?
        go.set()
        assert await reader.read(-1) == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
        writer.close()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_left_is_told_from_one_that_ended_its_sending(
    router: Running, start_worker: StartWorker, *, streams: bool
) -> None:
    async def silent(seen: Seen) -> None:
        if streams:
            await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
        await wait_gone(seen)

    worker = await start_worker(silent)
    await router.add(worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}")
    seen = (await worker.arrived())[0]
    if streams:
        await reader.readuntil(b"hi\r\n")
    writer.close()
    async with asyncio.timeout(NOTICE_S):
        await seen.gone.wait()
    assert [view["in_flight"] for view in await router.views()] == [0]


@pytest.mark.parametrize("framing", [b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", b"\r\nok"])
async def test_http_10_gets_no_chunks_and_no_keep_alive(
    router: Running, start_worker: StartWorker, framing: bytes
) -> None:
    async def handler(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\n" + framing)
        seen.writer.close()

    await router.add(await start_worker(handler))
    answer = await exchange(router.port, b"GET /x HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    assert (answer.status, answer.body) == (200, b"ok")
    assert answer.header(b"transfer-encoding") == [] and answer.header(b"connection") == [b"close"]


async def test_an_answer_to_http_10_that_breaks_off_is_no_clean_end(router: Running, start_worker: StartWorker) -> None:
    """Its end is the connection's: only a reset can tell."""

    async def cut(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        await asyncio.sleep(0.05)
        seen.writer.close()

    await router.add(await start_worker(cut))
    with pytest.raises(ConnectionResetError):
        await exchange(router.port, b"GET /x HTTP/1.0\r\n\r\n")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_of_http_10(router: Running, start_worker: StartWorker) -> None:
    async def stream(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")

    await router.add(await start_worker(stream))
    command = ("curl", "--http1.0", "--noproxy", "*", "-sS", "-m", "10", "-d", "{}", f"{router.url}/generate")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"ok")


async def test_expect_is_answered_before_the_body_and_never_for_what_is_refused(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(max_body_bytes=1000)
    await router.add(await start_worker())
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = b"POST /x HTTP/1.1\r\nhost: r\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % 3)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        writer.write(head % 1001)
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_one_connection_too_many_is_told(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(max_connections=3)
    await router.http.close()
    taken = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(3)]
    answer = await exchange(router.port, get(b"/healthz"))
    assert answer.status == 503 and b"--router-max-connections" in answer.body
    taken.pop()[1].close()

    async def served() -> bool:
        return (await exchange(router.port, get(b"/healthz"))).status == 200

    async with asyncio.timeout(5):
        while not await served():
            pass
    for _, writer in taken:
        writer.close()


async def test_unused_connections_are_closed_after_their_time(start_router: StartRouter) -> None:
    router = await start_router(client_keep_alive_s=0.2)
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        assert await reader.read(-1) == b""  # never used
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: r\r\n\r\n")
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_own_id_is_passed_both_ways_and_a_missing_one_is_made(
    router: Running, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    await router.add(worker)
    answer = await exchange(router.port, post(b"/x", extra=b"X-Request-Id: mine-1\r\n"))
    assert answer.header(b"x-request-id") == [b"mine-1"] == worker.requests[0].header(b"x-request-id")
    answer = await exchange(router.port, post(b"/x", extra=b"X-Request-Id: no good\r\n"))
    made = answer.header(b"x-request-id")
    assert made == worker.requests[1].header(b"x-request-id") and made != [b"no good"] and len(made) == 1


async def test_the_path_of_a_name_case_and_reason_are_kept(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(lambda seen: seen.answer(status=b"200 Fine By Me", extra=b"X-CaSe: 1\r\n"))
    await router.add(worker)
    answer = await exchange(router.port, get(b"/x", extra=b"X-MiNe:   spaced  out \r\n"))
    assert answer.head.startswith(b"HTTP/1.1 200 Fine By Me\r\n") and b"\r\nX-CaSe: 1" in answer.head
    assert b"\r\nX-MiNe: spaced  out" in worker.requests[0].head


async def test_many_connections_at_once_are_all_answered(router: Running) -> None:
    connections = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(300)]
    for _, writer in connections:
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: r\r\n\r\n")
    for reader, writer in connections:
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_client_with_an_error_amid_keep_alive_can_go_on(router: Running, start_worker: StartWorker) -> None:
    """An error of the router's own is an answer like any other: it does not cost the connection."""
    worker = await start_worker()
    await router.add(worker)
    await worker.die()
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as http:
        statuses = []
        for path in ("/healthz", "/pause_generation", "/healthz"):
            async with http.get(router.url + path) as answer:
                statuses.append(answer.status)
                await answer.read()
    assert statuses == [200, 403, 200]
