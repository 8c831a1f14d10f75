"""From a client's connection to an ASGI application: the router's own control surface.

Takes the body whole, up to a limit, before the application runs; gives its answer in the pieces that it sends. A client
that leaves cancels it.
"""

import asyncio
import time
from typing import TYPE_CHECKING
from urllib.parse import unquote

import structlog

from services.router.http.asgi import App, Message, Scope
from services.router.http.exchange import Exchange, Observer
from services.router.http.headers import REQUEST_ID, status_line
from services.router.http.request import Objection, Request, body_too_large
from services.router.settings import RouterSettings

if TYPE_CHECKING:
    from services.router.http.client import ClientConnection

log = structlog.get_logger()

NEVER = float("inf")


class Bridge(Exchange):
    """One request to the application."""

    __slots__ = ("_app", "_chunked", "_ended", "_gone", "_got_body", "_pieces", "_ready", "_settings", "_task")

    def __init__(
        self, to: "ClientConnection", request: Request, observer: Observer, app: App, settings: RouterSettings
    ) -> None:
        Exchange.__init__(self, to, request, observer)
        self._app = app
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._pieces: list[bytes] = []
        self._got_body = False
        self._chunked = False
        self._ended = False
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()

    def start(self) -> None:
        """Run the application once the body is whole."""
        request = self.request
        if request.whole and request.size_bytes <= self._settings.max_control_body_bytes:
            self._run()
        elif max(request.size_bytes, request.content_length or 0) > self._settings.max_control_body_bytes:
            self._too_large()
        else:
            self.to.deadline = time.monotonic() + self._settings.idle_timeout_s

    def on_body(self) -> None:
        """More of the body is there."""
        self.to.deadline = time.monotonic() + self._settings.idle_timeout_s
        if self.request.size_bytes > self._settings.max_control_body_bytes:
            self._too_large()

    def on_body_end(self) -> None:
        """The body is whole."""
        if self._task is None and not self.over:
            self._run()

    def on_client_ready(self) -> None:
        """The client takes more again."""
        self._ready.set()

    def on_client_left(self) -> None:
        """The client is gone, and with it whoever worked for it."""
        self._gone.set()
        if self._task is not None:
            self._task.cancel()
        Exchange.on_client_left(self)

    def expired(self, now: float) -> None:
        """The client was too slow, with its body or with taking the answer."""
        limit_s = self._settings.idle_timeout_s
        if self._task is None:
            message = f"the rest of the body did not come within {limit_s:g} s"
            self.on_bad_body(Objection(408, "client_stalled", message))
        else:
            self._task.cancel()
            self.break_off("client_stalled", f"the client took nothing for {limit_s:g} s")

    def cut_short(self) -> None:
        """There is no more time for this request."""
        if self._task is not None:
            self._task.cancel()
        if self.status:
            self.break_off("stopping", "the router is stopping")
        else:
            self.refuse(503, "stopping", "the router is stopping")

    def _too_large(self) -> None:
        self.on_bad_body(body_too_large(self._settings.max_control_body_bytes))

    # The application's side

    def _run(self) -> None:
        self.to.deadline = NEVER
        self._task = asyncio.get_running_loop().create_task(self._call(), name="control_request")

    async def _call(self) -> None:
        try:
            await self._app(self._scope(), self._receive, self._send)
        except Exception as error:  # the top of a task: the application's bug must not end the connection silently
            log.exception("control_request_failed", method=self.method, path=self.path[:200])
            self._failed(f"the router failed: {type(error).__name__}; its log tells more")
        else:
            if not self._ended:
                self._failed("the router gave no whole answer")

    def _failed(self, message: str) -> None:
        if self.over:
            return
        if self.status:
            self.break_off("internal", message)
        else:
            self.refuse(500, "internal", message)

    def _scope(self) -> Scope:
        request = self.request
        path, _, query = request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.0" if request.http_10 else "1.1",
            "method": request.method,
            "scheme": self.to.scheme,
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [*request.headers],
            "client": (self.to.peer, 0),
            "server": None,
            "state": {},
            "extensions": {},
        }

    async def _receive(self) -> Message:
        if not self._got_body:
            self._got_body = True
            return {"type": "http.request", "body": self.request.take_body(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.over:
            return
        if message["type"] == "http.response.start":
            self._head(message)
            return
        body = bytes(message.get("body", b""))
        more = bool(message.get("more_body", False))
        self._pieces.append(self._framed(body, more=more))
        if body or not more:
            data = b"".join(self._pieces)
            self._pieces = []
            if not self.first_byte:
                self.first_byte = self.sent = time.monotonic()
            self.bytes_out += len(body)
            self.to.half_chunk = self._chunked
            self.to.write(data)
        if not more:
            self._ended = True
            self.end()
            self.to.answered(self)
        elif self.to.full:
            self._ready.clear()
            self.to.deadline = time.monotonic() + self._settings.idle_timeout_s
            await self._ready.wait()
            self.to.deadline = NEVER

    def _framed(self, body: bytes, *, more: bool) -> bytes:
        if self.method == "HEAD":
            return b""
        if not self._chunked:
            return body
        data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return data if more else data + b"0\r\n\r\n"

    def _head(self, message: Message) -> None:
        self.status = status = int(message["status"])
        headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
        names = {name.lower() for name, _ in headers}
        lines = [b"%b: %b\r\n" % pair for pair in headers]
        if REQUEST_ID not in names:
            lines.append(b"x-request-id: %b\r\n" % self.request_id)
        self.close = self.to.closes_after(self.request)
        if b"content-length" not in names and status not in (204, 304):
            if self.request.http_10:
                self.close = True
            else:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if self.close:
            lines.append(b"connection: close\r\n")
        self._pieces = [status_line(status, b""), *lines, b"\r\n"]
        if status >= 500:
            self.error = self.error or f"answered_{status}"
