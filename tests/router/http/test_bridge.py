"""From a client's connection to an ASGI application and back."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from services.router.http.asgi import Receive, Scope, Send
from services.router.http.front import Front
from services.router.http.proxy import Proxy
from services.router.http.server import bind, on_socket, serve_http
from services.router.workers.workers import Workers
from tests.router.conftest import QUICK
from tests.router.raw_client import exchange, get, post

App = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
START = {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1")]}


@asynccontextmanager
async def serving(app: App, *, drain_s: float = 0.2, **changes: Any) -> AsyncGenerator[int]:
    """The port of a server whose control surface is this application."""
    settings = replace(QUICK, **changes)
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    front = Front(Proxy(Workers(settings), settings), app)
    async with serve_http(front, on_socket(sock), drain_s=drain_s):
        yield port


async def test_scope_and_body_are_what_was_sent() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend((scope, await receive()))
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app) as port:
        answer = await exchange(port, post(b"/workers/a%2Fb?x=%20&y", b"body", extra=b"X-Mine: 1\r\n"))
    scope, message = seen
    assert (scope["method"], scope["path"], scope["raw_path"]) == ("POST", "/workers/a/b", b"/workers/a%2Fb")
    assert (scope["query_string"], scope["http_version"], scope["scheme"]) == (b"x=%20&y", "1.1", "http")
    assert (b"x-mine", b"1") in scope["headers"] and (b"content-length", b"4") in scope["headers"]
    assert message == {"type": "http.request", "body": b"body", "more_body": False}
    assert (answer.status, answer.body) == (201, b"ok") and len(answer.header(b"x-request-id")) == 1


async def test_an_answer_in_pieces_arrives_in_pieces() -> None:
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await go.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async with serving(app) as port, asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get(b"/workers"))
        assert (await reader.readuntil(b"one\r\n")).endswith(
            b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n3\r\none\r\n"
        )
        go.set()
        assert await reader.read(-1) == b"3\r\ntwo\r\n0\r\n\r\n"
        writer.close()
        answer = await exchange(port, b"GET /workers HTTP/1.0\r\n\r\n")
        assert (answer.body, answer.header(b"transfer-encoding")) == (b"onetwo", [])
        assert (await exchange(port, get(b"/workers", method=b"HEAD"))).body == b""


async def test_an_application_that_fails_is_500_or_a_cut_answer() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/workers/late":
            await send(START)
            await send({"type": "http.response.body", "body": b"some", "more_body": True})
        if scope["path"] != "/workers/mute":
            raise RuntimeError("a bug")

    async with serving(app) as port:
        for path in (b"/workers/early", b"/workers/mute"):
            answer = await exchange(port, get(path))
            assert answer.status == 500 and b'"type":"internal"' in answer.body and b"a bug" not in answer.body
        late = await exchange(port, get(b"/workers/late"))
        assert late.status == 200 and late.body == b"4\r\nsome\r\n"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_cancels_the_application(*, begun: bool) -> None:
    arrived, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            await send(START)
            await send({"type": "http.response.body", "body": b"some", "more_body": True})
        arrived.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(app) as port, asyncio.timeout(5):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get(b"/workers"))
        await arrived.wait()
        writer.close()
        await cancelled.wait()


async def test_an_application_waits_for_a_client_that_takes_nothing() -> None:
    sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(START)
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            sent += 65536

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=65536)
        writer.write(get(b"/workers"))
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != sent:  # until it moves no more
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 20_000_000
        writer.close()


async def test_a_client_that_takes_nothing_for_too_long_is_cut_off() -> None:
    cancelled = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(app, idle_timeout_s=0.3) as port, asyncio.timeout(5):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=65536)
        writer.write(get(b"/workers"))
        await cancelled.wait()
        writer.close()


async def test_requests_are_ended_when_the_server_stops() -> None:
    arrived = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        arrived.set()
        await asyncio.Event().wait()

    async with serving(app) as port:
        call = asyncio.create_task(exchange(port, get(b"/workers")))
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        await arrived.wait()
    answer = await call
    assert answer.status == 503 and b"stopping" in answer.body
    assert await idle_reader.read(-1) == b""
    idle_writer.close()


async def test_bodies_of_control_requests_are_bounded_while_they_come() -> None:
    called = False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal called
        called = True

    async with serving(app, max_control_body_bytes=1000, idle_timeout_s=0.3) as port:
        declared = b"POST /workers HTTP/1.1\r\nhost: r\r\ncontent-length: 1001\r\n\r\n"
        assert (await exchange(port, declared + b"x" * 1001)).status == 413
        assert (await exchange(port, b"POST /workers HTTP/1.1\r\nhost: r\r\ncontent-length: 9\r\n\r\nx")).status == 408
    assert not called
