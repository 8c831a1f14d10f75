"""Requests that two readers could understand differently are refused, and no worker sees them."""

import asyncio
from pathlib import Path

import pytest

from services.router.workers.workers import State
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.raw_client import exchange, get, post

HEAD = b"POST /generate HTTP/1.1\r\nhost: r\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: r\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"content-length: 0\r\ncontent-length: 40\r\n\r\n" + SMUGGLED,
        HEAD + b"content-length: 0, 40\r\n\r\n" + SMUGGLED,
        HEAD + b"content-length: +0\r\n\r\n" + SMUGGLED,
        HEAD + b"content-length: 0x1\r\n\r\n" + SMUGGLED,
        HEAD + b"content-length:\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\nhello\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n;\r\nhello\r\n0\r\n\r\n",
        HEAD + b"x-a: b\r\n folded\r\n\r\n",
        HEAD + b"x-a: b\n\r\n",
        HEAD + b"x-a: b\x00c\r\n\r\n",
        HEAD + b"x a: b\r\n\r\n",
        HEAD + b": b\r\n\r\n",
        HEAD + b"host: other\r\n\r\n",
        b"POST /generate HTTP/1.1\nhost: r\n\n",
        b"GET /generate HTTP/1.1\r\n\r\n",
        b"GET /flush_cache#/../generate HTTP/1.1\r\nhost: r\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nhost: r\r\n\r\n",
        b"GET /x\x80 HTTP/1.1\r\nhost: r\r\n\r\n",
        b"GET /generate\r\n\r\n",
        b"GET /generate HTTP/2.0\r\nhost: r\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_ambiguous_requests_are_refused(router: Running, start_worker: StartWorker, request_bytes: bytes) -> None:
    worker = await start_worker()
    await router.add(worker)
    answer = await exchange(router.port, request_bytes)
    assert answer.status in (400, 501, 505) and answer.header(b"connection") == [b"close"]
    assert answer.header(b"content-type") == [b"application/json"] and b'{"error":{"type":' in answer.body
    assert not [seen for seen in worker.requests if b"smuggled" in seen.head or seen.body]
    assert (await exchange(router.port, post(b"/generate"))).status == 200


async def test_a_bad_chunk_amid_an_upload_ends_it_on_both_sides(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    bad = HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n"
    answer = await exchange(router.port, bad)
    assert answer.status == 400 and worker.requests == []
    assert [view["in_flight"] for view in await router.views()] == [0]


async def test_trailers_and_chunk_extensions_end_at_the_router(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    body = b"5;x=y\r\nhello\r\n0\r\nx-trailer: 1\r\nauthorization: evil\r\n\r\n"
    answer = await exchange(
        router.port, HEAD + b"connection: close\r\ntrailer: x-trailer\r\ntransfer-encoding: chunked\r\n\r\n" + body
    )
    assert answer.status == 200 and worker.requests[0].body == b"hello"
    assert b"trailer" not in worker.requests[0].head and worker.requests[0].header(b"authorization") == []


async def test_trailers_of_an_answer_are_dropped(router: Running, start_worker: StartWorker) -> None:
    head = b"HTTP/1.1 200 OK\r\ntrailer: x-t\r\ntransfer-encoding: chunked\r\n\r\n"
    await router.add(await start_worker(lambda seen: seen.send(head + b"2\r\nok\r\n0\r\nx-t: 1\r\n\r\n")))
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.body == b"2\r\nok\r\n0\r\n\r\n" and answer.header(b"trailer") == []


async def test_headers_that_connection_names_do_not_travel(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(lambda seen: seen.answer(extra=b"Connection: x-there\r\nX-There: 1\r\n"))
    await router.add(worker)
    answer = await exchange(router.port, get(b"/x", extra=b"Connection: x-here\r\nX-Here: 1\r\n"))
    assert answer.status == 200 and answer.header(b"x-there") == [] and worker.requests[0].header(b"x-here") == []


async def test_targets_of_a_forward_proxy(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    answer = await exchange(router.port, get(b"http://elsewhere:9/generate?x=1"))
    assert answer.status == 200 and worker.requests[0].line == b"GET /generate?x=1 HTTP/1.1"
    refused = await exchange(router.port, get(b"http://elsewhere/pause_generation"))
    assert refused.status == 403


@pytest.mark.parametrize("method", [b"CONNECT elsewhere:443", b"GET /generate"])
async def test_tunnels_and_upgrades_are_refused(router: Running, start_worker: StartWorker, method: bytes) -> None:
    worker = await start_worker()
    await router.add(worker)
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n"
    answer = await exchange(router.port, method + b" HTTP/1.1\r\nhost: r\r\n" + upgrade + b"\r\n")
    assert answer.status == 501 and b"upgrade_refused" in answer.body and worker.requests == []


@pytest.mark.parametrize(
    ("request_bytes", "status", "kind"),
    [
        (get(b"/" + b"a" * 400), 414, b"url_too_large"),
        (get(b"/x", extra=b"x-a: %s\r\n" % (b"a" * 3000)), 431, b"head_too_large"),
        (get(b"/x", extra=b"x-a: b\r\n" * 500), 431, b"head_too_large"),
        (b"GET /x HTTP/1.1\r\nx-a: " + b"a" * 5000, 431, b"head_too_large"),
        (post(b"/x", b"a" * 3000), 413, b"body_too_large"),
        (b"POST /x HTTP/1.1\r\nhost: r\r\ncontent-length: 99999999\r\n\r\n", 413, b"body_too_large"),
        (
            b"POST /x HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\nbb8\r\n%s\r\n0\r\n\r\n" % (b"a" * 3000),
            413,
            b"body_too_large",
        ),
    ],
)
async def test_what_is_too_large_is_told(
    start_router: StartRouter, start_worker: StartWorker, request_bytes: bytes, status: int, kind: bytes
) -> None:
    router = await start_router(max_head_bytes=2000, max_url_bytes=300, max_body_bytes=2000)
    worker = await start_worker()
    await router.add(worker)
    answer = await exchange(router.port, request_bytes)
    assert answer.status == status and kind in answer.body
    assert not [seen for seen in worker.requests if seen.body]


async def test_an_answer_before_the_end_of_an_upload_is_read_by_a_client_that_sends_on(
    start_router: StartRouter,
) -> None:
    """It must not be lost to a reset, which bytes that nobody reads would cause."""
    router = await start_router(max_body_bytes=1000)
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(HEAD + b"content-length: 2000000\r\n\r\n")
        for _ in range(20):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_too_large_a_head_is_refused(router: Running) -> None:
    answer = await exchange(router.port, get(b"/x", extra=b"x-a: %s\r\n" % (b"a" * 1000) * 100))
    assert answer.status == 431 and b"head_too_large" in answer.body
    assert (await exchange(router.port, get(b"/" + b"a" * 60_000))).status == 414


@pytest.mark.parametrize("begin", [b"GET /", b"GET /x HTTP/1.1\r\nx-a: "])
async def test_a_head_without_end_is_cut_off(router: Running, begin: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(begin)
    sent = 0
    with pytest.raises(ConnectionError):
        while sent < 50_000_000:
            writer.write(b"a" * 65536)
            await writer.drain()
            sent += 65536
    assert sent < 10_000_000


async def test_the_routers_token_reaches_no_worker_however_it_is_sent(
    start_router: StartRouter, start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret-token\n")
    router = await start_router(token_file=str(tmp_path / "token"))
    worker = await start_worker()
    router.listening.router.add(worker.url, admit=True)
    await router.until_state(worker.url, State.READY)
    both = b"Authorization: Bearer secret-token\r\nauthorization: Bearer other\r\n"
    misspelled = [b"Bearer\tsecret-token", b"secret-token", b"Token secret-token", b'Bearer "secret-token", x']
    wrong = [b"authorization: %b\r\n" % value for value in misspelled]
    for extra in (b"authorization: Bearer secret-token\r\n", both, b"AUTHORIZATION:bearer   secret-token\r\n", *wrong):
        assert (await exchange(router.port, post(b"/generate", extra=extra))).status == 200
    assert not [seen for seen in worker.requests if b"secret-token" in seen.head]
    assert (await exchange(router.port, post(b"/x", extra=b"authorization: Bearer mine\r\n"))).status == 200
    assert worker.requests[-1].header(b"authorization") == [b"Bearer mine"]
