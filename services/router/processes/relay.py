"""The control surface of a secondary: its requests go to the primary over the link, whose answers come back.

Bodies are bounded before they come here. A client that leaves ends its request there too.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import structlog

from services.router.http.answers import error_content
from services.router.http.asgi import App, Message, Receive, Scope, Send
from services.router.processes.frames import PIECE_BYTES, Frame

log = structlog.get_logger()

MAX_CALLS = 1024
"""Requests of one secondary that are at the primary at once."""
TEXTS = ("http_version", "method", "scheme", "path", "root_path")
BYTES = ("raw_path", "query_string")
Tell = Callable[[Frame, bytes], None]


class Relay:
    """An ASGI application: the secondary's end."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._last = 0
        self._answers: dict[int, asyncio.Queue[tuple[Frame, bytes]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._answers) >= MAX_CALLS:
            await _refuse(send)
            return
        body = (await receive()).get("body", b"")
        self._last += 1
        number = self._last
        answers = self._answers[number] = asyncio.Queue()
        ended = False
        try:
            self._tell({"call": number, "scope": _told(scope)}, body)
            while not ended:
                frame, blob = await answers.get()
                if "status" in frame:
                    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in frame["headers"]]
                    await send({"type": "http.response.start", "status": frame["status"], "headers": headers})
                else:
                    ended = not frame["more"]
                    await send({"type": "http.response.body", "body": blob, "more_body": frame["more"]})
        finally:
            del self._answers[number]
            if not ended:
                self._tell({"left": number}, b"")

    def on_answer(self, frame: Frame, blob: bytes) -> None:
        """A part of an answer came."""
        answers = self._answers.get(frame["answer"])
        if answers is not None:
            answers.put_nowait((frame, blob))


class RelayEnd:
    """The primary's end, for one secondary: runs the application for its requests."""

    def __init__(self, app: App, tell: Tell) -> None:
        self._app = app
        self._tell = tell
        self._running: dict[int, asyncio.Task[None]] = {}

    def on_call(self, frame: Frame, body: bytes) -> None:
        """A request came."""
        number = frame["call"]
        task = asyncio.create_task(self._answer(number, _scope(frame["scope"]), body), name="relayed_request")
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number, None))

    def on_left(self, frame: Frame) -> None:
        """The client of a request is gone."""
        task = self._running.get(frame["left"])
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """The secondary is gone, and with it its clients."""
        for task in list(self._running.values()):
            task.cancel()

    async def _answer(self, number: int, scope: Scope, body: bytes) -> None:
        pieces = [body]
        ended = False

        async def receive() -> Message:
            if pieces:
                return {"type": "http.request", "body": pieces.pop(), "more_body": False}
            await asyncio.get_running_loop().create_future()  # until cancelled: its client is watched at the other end
            raise AssertionError("a future of nobody has no result")

        async def send(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                headers = [[bytes(n).decode("latin-1"), bytes(v).decode("latin-1")] for n, v in message["headers"]]
                self._tell({"answer": number, "status": message["status"], "headers": headers}, b"")
                return
            blob, more = bytes(message.get("body", b"")), bool(message.get("more_body", False))
            while len(blob) > PIECE_BYTES:
                self._tell({"answer": number, "more": True}, blob[:PIECE_BYTES])
                blob = blob[PIECE_BYTES:]
            ended = not more
            self._tell({"answer": number, "more": more}, blob)

        try:
            await self._app(scope, receive, send)
        except Exception:  # the top of a task
            log.exception("relayed_request_failed", method=scope["method"], path=scope["path"][:200])
        if not ended:
            content = orjson.dumps(error_content("internal", "the router failed; its log tells more"))
            kind = ["content-type", "application/json"]
            self._tell({"answer": number, "status": 500, "headers": [kind]}, b"")
            self._tell({"answer": number, "more": False}, content)


async def _refuse(send: Send) -> None:
    message = f"{MAX_CALLS} control requests are under way already: send it again later"
    body = orjson.dumps(error_content("too_many_requests", message))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _told(scope: Scope) -> dict[str, Any]:  # Any: JSON's own open tree
    told: dict[str, Any] = {key: scope[key] for key in TEXTS}
    told |= {key: scope[key].decode("latin-1") for key in BYTES}
    told["headers"] = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
    told["client"] = scope["client"]
    return told


def _scope(told: dict[str, Any]) -> Scope:  # Any: JSON's own open tree
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        **{key: told[key] for key in TEXTS},
        **{key: told[key].encode("latin-1") for key in BYTES},
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told["headers"]],
        "client": tuple(told["client"]),
        "server": None,
        "state": {},
        "extensions": {},
    }
