"""What goes through is what came in: bytes, headers, status, streams."""

import asyncio
import gzip
from collections.abc import AsyncGenerator

import pytest

from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import Seen
from tests.router.raw_client import exchange, get, post


async def test_path_and_query_arrive_byte_for_byte(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    for target in (b"/get_server_info?x=1&y=a%20b", b"/a%2Fb//c;p?", b"/x?q=%zz&q=1&&", b"/v1/models/a%41", b"/?"):
        assert (await exchange(router.port, get(target))).status == 200
        assert worker.requests[-1].line == b"GET " + target + b" HTTP/1.1"


async def test_request_headers(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    extra = (
        b"X-A: 1\r\nX-A: 2\r\nUser-Agent: mine\r\nTE: trailers\r\nConnection: x-hop\r\nX-Hop: 1\r\nAuthorization: k\r\n"
    )
    await exchange(router.port, post(b"/generate", b"{}", extra=extra))
    seen = worker.requests[0]
    assert len(seen.header(b"x-request-id")) == 1
    assert [pair for pair in seen.headers if pair[0] != b"x-request-id"] == [
        (b"host", worker.url.removeprefix("http://").encode()),
        (b"x-a", b"1"),
        (b"x-a", b"2"),
        (b"user-agent", b"mine"),
        (b"authorization", b"k"),
        (b"content-length", b"2"),
    ]


@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
async def test_answer_headers(router: Running, start_worker: StartWorker, connection: bytes) -> None:
    extra = b"Set-Cookie: a\r\nSet-Cookie: b\r\nServer: engine\r\nDate: then\r\n"
    extra += b"Keep-Alive: timeout=5\r\n" + connection
    await router.add(await start_worker(lambda seen: seen.answer(b"{}", extra=extra)))
    answer = await exchange(router.port, get(b"/model_info"))
    assert answer.header(b"set-cookie") == [b"a", b"b"]
    assert answer.header(b"server") == [b"engine"] and answer.header(b"date") == [b"then"]
    assert answer.header(b"keep-alive") == [] and answer.header(b"connection") == [b"close"]


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS"])
async def test_any_method(router: Running, start_worker: StartWorker, method: bytes) -> None:
    worker = await start_worker()
    await router.add(worker)
    answer = await exchange(router.port, get(b"/thing", method=method))
    assert answer.status == 200 and worker.requests[0].line.startswith(method + b" ")


async def test_encoded_bytes_pass_as_they_are(router: Running, start_worker: StartWorker) -> None:
    packed = gzip.compress(b"x" * 100_000)
    await router.add(await start_worker(lambda seen: seen.answer(packed, extra=b"content-encoding: gzip\r\n")))
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.body == packed
    assert answer.header(b"content-length") == [b"%d" % len(packed)]
    assert answer.header(b"content-encoding") == [b"gzip"]


async def test_head_keeps_the_length_and_has_no_body(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(lambda seen: seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n"))
    await router.add(worker)
    answer = await exchange(router.port, get(b"/model_info", method=b"HEAD"))
    assert (answer.status, answer.body, answer.header(b"content-length")) == (200, b"", [b"1234"])


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_answers_without_body(router: Running, start_worker: StartWorker, status: bytes) -> None:
    await router.add(await start_worker(lambda seen: seen.send(b"HTTP/1.1 " + status + b"\r\nx-a: 1\r\n\r\n")))
    answer = await exchange(router.port, get(b"/thing"))
    assert (answer.status, answer.body, answer.header(b"x-a")) == (int(status[:3]), b"", [b"1"])
    assert answer.header(b"transfer-encoding") == []


async def test_interim_answers_are_not_the_answer(router: Running, start_worker: StartWorker) -> None:
    async def handler(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await seen.answer(b"real")

    await router.add(await start_worker(handler))
    answer = await exchange(router.port, post(b"/generate"))
    assert (answer.status, answer.body, answer.header(b"link")) == (200, b"real", [])


@pytest.mark.parametrize("status", [b"400 Bad Request", b"429 Too Many Requests", b"500 Oops", b"503 Full"])
async def test_status_and_body_of_a_streaming_call_are_kept(
    router: Running, start_worker: StartWorker, status: bytes
) -> None:
    worker = await start_worker(lambda seen: seen.answer(b'{"error":"context length"}', status=status))
    await router.add(worker)
    answer = await exchange(router.port, post(b"/generate", b'{"stream":true}'))
    assert (answer.status, answer.body) == (int(status[:3]), b'{"error":"context length"}')
    assert len(worker.requests) == 1


async def test_a_stream_arrives_piece_by_piece(router: Running, start_worker: StartWorker) -> None:
    more = asyncio.Event()

    async def handler(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await seen.send(b"9\r\ndata: 1\n\n\r\n")
        await more.wait()
        await seen.send(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    await router.add(await start_worker(handler))
    async with router.http.post(f"{router.url}/generate", json={"stream": True}) as answer:
        assert await answer.content.readany() == b"data: 1\n\n"  # before the worker goes on
        more.set()
        assert await answer.content.read() == b"data: 2\n\n"


async def test_a_body_that_ends_with_the_connection_is_whole(router: Running, start_worker: StartWorker) -> None:
    async def handler(seen: Seen) -> None:
        await seen.send(b"HTTP/1.0 200 OK\r\n\r\nall of it")
        seen.writer.close()

    await router.add(await start_worker(handler))
    async with router.http.get(f"{router.url}/thing") as answer:
        assert await answer.read() == b"all of it"


async def test_a_body_in_chunks_arrives(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)

    async def pieces() -> AsyncGenerator[bytes]:
        for number in range(100):
            yield b"%04d" % number * 1000
            await asyncio.sleep(0)

    async with router.http.post(f"{router.url}/generate", data=pieces()) as answer:
        assert answer.status == 200
    assert worker.requests[0].body == b"".join(b"%04d" % number * 1000 for number in range(100))


async def test_expect_100_continue(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    async with router.http.post(f"{router.url}/generate", data=b"abc", expect100=True) as answer:
        assert answer.status == 200
    assert worker.requests[0].body == b"abc" and worker.requests[0].header(b"expect") == []


async def test_an_early_answer_to_a_long_upload_is_passed_on(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(lambda seen: seen.answer(b"too large", status=b"413 Too Large"))
    worker.read_bodies = False
    await router.add(worker)
    worker_id = (await router.views())[0]["id"]
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1000)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413")
        writer.close()
    assert [view["in_flight"] for view in await router.views() if view["id"] == worker_id] == [0]


async def test_pipelined_and_kept_connections(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(lambda seen: seen.answer(b"<" + seen.path + b">"))
    await router.add(worker)
    request = b"GET /%d HTTP/1.1\r\nhost: r\r\n\r\n"
    answer = await exchange(router.port, request % 1 + request % 2 + get(b"/3"))
    assert [answer.body.count(b"</%d>" % n) for n in (1, 2, 3)] == [1, 1, 1]
    assert worker.num_connections - len(worker.probes) == 1  # the router kept its own, too


async def test_upgrade_is_refused_and_no_body_is_lost(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    extra = b"connection: upgrade\r\nupgrade: h2c\r\n"
    answer = await exchange(router.port, post(b"/generate", b"12345", extra=extra))
    assert answer.status == 501 and worker.requests == []


async def test_ipv6(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(host="::1")
    worker = await start_worker(host="::1")
    await router.add(worker)
    assert router.url.startswith("http://[::1]:") and router.grpc.startswith("[::1]:")
    async with router.http.post(f"{router.url}/generate", json={}) as answer:
        assert answer.status == 200
    assert worker.requests[0].header(b"host") == [b"[::1]:%d" % worker.port]
