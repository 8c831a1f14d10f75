"""A small ASGI layer: routes, bodies, answers, streams, and clients that go away.

It owns HTTP and knows nothing of models. It must never let an exception end as a bare 500 without a log line, and
never go on working for a client that has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import orjson
import structlog

from services.rollout.engine.errors import RequestError, validation_error

Message = MutableMapping[str, Any]  # ASGI's own type
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
log = structlog.get_logger()

JSON_HEADERS = [(b"content-type", b"application/json")]
TEXT_HEADERS = [(b"content-type", b"text/plain; charset=utf-8")]
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
MAX_BODY_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
    """A whole response."""

    status: int = 200
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: JSON_HEADERS)


@dataclass(frozen=True)
class Stream:
    """A response of server-sent events; `events` is closed when the client leaves."""

    events: AsyncIterator[bytes]


def json_answer(value: object, status: int = 200) -> Answer:
    """A JSON response; lone surrogates that a tokenizer can make become replacement characters."""
    return Answer(status, orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY))


def text_answer(text: str, status: int = 200) -> Answer:
    """A plain-text response."""
    return Answer(status, text.encode(), TEXT_HEADERS)


def error_answer(error: RequestError) -> Answer:
    """The response that an error stands for."""
    return json_answer(error.body, error.status)


@dataclass(frozen=True)
class Request:
    """A request whose body has been read."""

    method: str
    path: str
    query: dict[str, str]
    content_type: str
    body: bytes

    def json(self, *, required: bool = True) -> dict[str, Any]:
        """Return the body as a JSON object; RequestError says what is wrong with it."""
        if not self.body.strip():
            if not required:
                return {}
            raise validation_error(_missing_body())
        if self.content_type and "json" not in self.content_type:
            raise validation_error(
                "1 validation error:\n  {'type': 'dataclass_type', 'loc': ('body',), "
                f"'msg': \"content-type must be application/json, got {self.content_type!r}\"}}"
            )
        try:
            value = orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            detail = f"{{'type': 'json_invalid', 'loc': ('body', {error.pos}), 'msg': 'JSON decode error', "
            raise validation_error(
                f"1 validation error:\n  {detail}'input': {{}}, 'ctx': {{'error': {error.msg!r}}}}}"
            ) from None
        if not isinstance(value, dict):
            raise validation_error(
                "1 validation error:\n  {'type': 'dataclass_type', 'loc': ('body',), "
                "'msg': 'Input should be a dictionary'}"
            )
        return value


def _missing_body() -> str:
    detail = "{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}"
    return f"1 validation error:\n  {detail}"


Handler = Callable[[Request], Coroutine[Any, Any, Answer | Stream]]


class Application:
    """Routes requests to handlers: an ASGI application."""

    def __init__(self) -> None:
        self._routes: dict[str, dict[str, Handler]] = {}
        self._prefixes: dict[str, dict[str, Handler]] = {}

    def route(self, methods: str, *paths: str, handler: Handler) -> None:
        """Serve paths with a handler; methods are space-separated; a path ending in * matches its beginning."""
        for path in paths:
            table = self._prefixes if path.endswith("*") else self._routes
            entry = table.setdefault(path.rstrip("*"), {})
            for method in methods.split():
                entry[method] = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        handler = self._find(scope["path"], scope["method"])
        try:
            body = await _read_body(receive)
        except RequestError as error:
            await _send(send, error_answer(error))
            return
        if isinstance(handler, Answer):
            await _send(send, handler)
        elif body is not None:
            await _serve(handler, _request(scope, body), receive, send)

    def _find(self, path: str, method: str) -> Handler | Answer:
        entry = self._routes.get(path) or self._routes.get(path.rstrip("/"))
        if entry is None:
            entry = next((item for prefix, item in self._prefixes.items() if path.startswith(prefix)), None)
        if entry is None:
            return json_answer({"detail": "Not Found"}, 404)
        return entry.get(method) or json_answer({"detail": "Method Not Allowed"}, 405)


def _request(scope: Scope, body: bytes) -> Request:
    headers = dict(scope["headers"])
    query = parse_qs(scope["query_string"].decode("latin-1"))
    return Request(
        method=scope["method"],
        path=scope["path"],
        query={name: values[-1] for name, values in query.items()},
        content_type=headers.get(b"content-type", b"").decode("latin-1").lower(),
        body=body,
    )


async def _read_body(receive: Receive) -> bytes | None:
    """Return the whole body, or None if the client left before its end."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise validation_error(f"The body must be at most {MAX_BODY_BYTES} bytes.", status=413)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _serve(handler: Handler, request: Request, receive: Receive, send: Send) -> None:
    work = asyncio.ensure_future(_answer(handler, request))
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return  # the client has left: cancelling the handler aborts what it waits for
        answer = work.result()
        if isinstance(answer, Answer):
            await _send(send, answer)
        else:
            await _send_stream(send, answer, gone)
    finally:
        gone.cancel()
        work.cancel()


async def _answer(handler: Handler, request: Request) -> Answer | Stream:
    try:
        return await handler(request)
    except RequestError as error:
        return error_answer(error)
    except Exception:
        log.exception("request_failed", path=request.path)
        body = {"error": {"message": f"Internal error while serving {request.path}; the engine's log has it."}}
        return json_answer(body, 500)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, answer: Answer) -> None:
    length = (b"content-length", str(len(answer.body)).encode())
    await send({"type": "http.response.start", "status": answer.status, "headers": [*answer.headers, length]})
    await send({"type": "http.response.body", "body": answer.body})


async def _send_stream(send: Send, stream: Stream, gone: asyncio.Future[None]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    pump = asyncio.ensure_future(_pump(send, stream.events))
    try:
        await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        if pump.done():
            pump.result()
            await send({"type": "http.response.body", "body": b""})
    finally:
        pump.cancel()
        await asyncio.wait((pump,))


async def _pump(send: Send, events: AsyncIterator[bytes]) -> None:
    async for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})


def sse(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
