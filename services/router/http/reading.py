"""Reading requests from a client's connection: whole heads, bodies as they come, one request begun after the other.

Owns the order of requests and what is kept of those that a client sends ahead: one read. Knows no worker, and not how
an answer is sent.
"""

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from services.router.http.exchange import Exchange
from services.router.http.request import Objection, Request, body_too_large

if TYPE_CHECKING:
    from services.router.http.client import ClientConnection
    from services.router.http.server import Server

MAX_PIPELINED = 256
"""Requests that one read may bring; a connection with more is closed after these."""
MAX_AHEAD_BYTES = 64 * 1024
"""What is read of later requests while one is being answered."""
MAX_DISCARDED_BYTES = 4 * 1024 * 1024
"""What is read and thrown away, of a client that was refused and sends on, before it is cut off."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NEVER = float("inf")


class RequestReader(asyncio.Protocol):
    """The reading half of `ClientConnection`."""

    __slots__ = (
        "_ahead",
        "_ahead_bytes",
        "_arrived",
        "_beginning",
        "_deaf",
        "_discarded_bytes",
        "_half_closed",
        "_head_bytes",
        "_head_timed",
        "_parser",
        "_reading",
        "_server",
        "_transport",
        "deadline",
        "exchange",
        "full",
        "paused",
    )

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self.exchange: Exchange | None = None
        """The request that is being answered."""
        self.deadline = NEVER
        """Monotonic time at which `expired` is called."""
        self.full = False
        """The client takes no more for now; then no other request of it is begun either."""
        self.paused = False
        """Nothing is read for now, so that the client's end would not be seen either."""
        self._reading: Request | None = None
        """The request whose bytes are coming."""
        self._arrived: deque[Request] = deque()
        """Requests that are whole and wait their turn."""
        self._ahead: list[bytes] = []
        """Bytes behind the request that is being answered."""
        self._ahead_bytes = 0
        self._head_bytes = 0
        """What came since there was a head or a piece of a body: of a head, of chunk extensions, or of trailers."""
        self._head_timed = False
        """The time for the head that is being read runs."""
        self._beginning = False
        self._deaf = False
        """Nothing that comes is looked at any more."""
        self._discarded_bytes = 0
        self._half_closed = False
        """The client sends no more."""

    def pause(self) -> None:
        """Read no more until `resume`: the client has to wait."""
        if not self.paused:
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.paused:
            self.paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _end(self, *, gently: bool) -> None:
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self._transport.abort()
            return
        exchange = self.exchange
        is_ahead = self.full if exchange is None else exchange.request.whole
        if not is_ahead:
            self._read(data)
            return
        self._ahead.append(data)
        self._ahead_bytes += len(data)
        if self._ahead_bytes > MAX_AHEAD_BYTES:
            self.pause()

    def _read(self, data: bytes) -> None:
        self._head_bytes += len(data)
        parser = self._parser
        if parser is None:
            return
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            if not self._deaf:  # else it complains of what came behind the last request
                self._not_http(error)
        if self._head_bytes > self._server.limits.max_head_bytes and not self._deaf:
            self._object(self._server.head_too_large)
        exchange = self.exchange
        if exchange is None:
            self._go_on()
        elif exchange.request is self._reading and exchange.request.pieces:
            exchange.on_body()

    def _not_http(self, error: httptools.HttpParserError) -> None:
        self._object(Objection(400, "bad_request", f"this is not HTTP/1.1: {error}"))

    def _object(self, objection: Objection) -> None:
        """Refuse what is being read, after what came before it has been answered. Nothing is read any more."""
        self._deaf = True
        reading, self._reading = self._reading, None
        exchange = self.exchange
        if exchange is not None and exchange.request is reading:
            exchange.request.objection = objection
            exchange.on_bad_body(objection)
            return
        refused = reading or Request()
        refused.objection = objection
        refused.keep_alive = False
        self._arrived.append(refused)
        if exchange is None:
            self._go_on()

    def _go_on(self) -> None:
        """Begin what waits, one after the other. Never within itself, however fast the answers."""
        if self._beginning:
            return
        self._beginning = True
        while self.exchange is None and not self.full:
            if self._arrived:
                self._begin(self._arrived.popleft())
            elif self._ahead and not self._deaf:
                data = b"".join(self._ahead)
                self._ahead.clear()
                self._ahead_bytes = 0
                self.resume()
                self._read(data)
            elif self._reading is not None and self._reading.method and self._reading.ready:
                self._begin(self._reading)
            else:
                break
        self._beginning = False
        if self.exchange is None and not self._deaf and not self.full:
            self._wait()

    def _wait(self) -> None:
        """Nothing can be begun: more has to come."""
        if self._half_closed:
            self._end(gently=False)
            return
        self.resume()
        reading = self._reading
        if reading is None:
            return
        if reading.method:
            self.deadline = time.monotonic() + self._server.settings.idle_timeout_s
            self._continue(reading)
        elif not self._head_timed:
            self._head_timed = True
            self.deadline = time.monotonic() + self._server.settings.client_head_timeout_s

    def _continue(self, request: Request) -> None:
        """Tell a client that waits for it to send the body."""
        if request.expects_100 and not request.size_bytes:
            request.expects_100 = False
            self._transport.write(CONTINUE)

    def _begin(self, request: Request) -> None:
        self.deadline = NEVER
        exchange = self.exchange = self._server.exchange_for(cast("ClientConnection", self), request)
        if not request.whole and request.objection is None:
            self._continue(request)
        exchange.start()

    # httptools' calls

    def on_message_begin(self) -> None:
        if not self._deaf:
            self._reading = Request()

    def on_url(self, url: bytes) -> None:
        if not self._deaf and self._reading is not None:
            self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        reading = self._reading
        if reading is not None and not reading.method:  # else a trailer
            reading.headers.append((name, value))

    def on_headers_complete(self) -> None:
        reading = self._reading
        parser = self._parser
        if reading is None or self._deaf or parser is None:
            return
        head_bytes, self._head_bytes = self._head_bytes, 0
        self._head_timed = False
        upgrade = parser.should_upgrade()
        reading.judge(
            method=parser.get_method(),
            version=parser.get_http_version(),
            keep_alive=parser.should_keep_alive(),
            upgrade=upgrade,
            limits=self._server.limits,
        )
        if (
            head_bytes > self._server.limits.max_head_bytes
        ):  # of which other parts of what was read may make up the most
            size = len(reading.target) + sum(len(name) + len(value) + 4 for name, value in reading.headers)
            if size > self._server.limits.max_head_bytes:
                reading.objection = self._server.head_too_large
        if reading.objection is not None:
            self._object(reading.objection)

    def on_body(self, piece: bytes) -> None:
        reading = self._reading
        if reading is None or self._deaf:
            return
        self._head_bytes = 0
        reading.size_bytes += len(piece)
        reading.pieces.append(piece)
        limit = self._server.limits.max_body_bytes
        if limit and reading.size_bytes > limit:
            self._object(body_too_large(limit))

    def on_message_complete(self) -> None:
        reading = self._reading
        if reading is None or self._deaf:
            return
        reading.whole = True
        self._reading = None
        self._head_bytes = 0
        if not reading.keep_alive:
            self._deaf = True
        exchange = self.exchange
        if exchange is not None and exchange.request is reading:
            if reading.pieces:
                exchange.on_body()
            exchange.on_body_end()
            return
        self._arrived.append(reading)
        if len(self._arrived) >= MAX_PIPELINED:
            reading.keep_alive = False
            self._deaf = True
