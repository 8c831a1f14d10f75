"""A client's connection: reads requests, lets them be answered one after the other, in their order.

Owns the framing towards the client and who waits for whom on one connection. Knows no worker. Of what a client sends
ahead it keeps one read; there is no task and no timer here: the server's sweep looks at `deadline`.
"""

import asyncio
import socket
import struct
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from services.router.http.exchange import Exchange
from services.router.http.request import Objection, Request, body_too_large

if TYPE_CHECKING:
    from services.router.http.server import Server

MAX_PIPELINED = 256
"""Requests that one read may bring; a connection with more is closed after these."""
MAX_AHEAD_BYTES = 64 * 1024
"""What is read of later requests while one is being answered."""
BUFFER_BYTES = 256 * 1024
"""What is kept of a body while it cannot travel on."""
MAX_DISCARDED_BYTES = 4 * 1024 * 1024
"""What is read and thrown away, of a client that was refused and sends on, before it is cut off."""
LINGER_S = 2.0
"""A client that was refused while it was sending gets so long to read the answer before the connection is closed."""
NEVER = float("inf")
_LOOK_S = (0.001, 0.005, 0.01, 0.02, 0.05)
"""When to look whether a client that ended its sending is gone; then as often as the last."""
_TCP_CLOSE = 7  # tcpi_state, include/net/tcp_states.h


class ClientConnection(asyncio.Protocol):
    """One connection. The exchange calls `write`, `closes_after`, `answered`, `break_off`, `pause`, `resume`."""

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
        "_lingers",
        "_parser",
        "_peer",
        "_probed",
        "_read_paused",
        "_reading",
        "_server",
        "_transport",
        "deadline",
        "exchange",
        "full",
        "half_chunk",
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
        """The client takes no more for now."""
        self.half_chunk = False
        """The client is being sent chunks, and between two of them now."""
        self._peer: str | None = None
        self._reading: Request | None = None
        """The request whose bytes are coming."""
        self._arrived: deque[Request] = deque()
        """Requests that are whole and wait their turn."""
        self._ahead: list[bytes] = []
        """Bytes behind the request that is being answered."""
        self._ahead_bytes = 0
        self._head_bytes = 0
        self._head_timed = False
        self._beginning = False
        self._read_paused = False
        self._deaf = False  # nothing that comes is looked at any more
        self._discarded_bytes = 0
        self._lingers = False
        self._half_closed = False
        self._probed = False

    # What exchanges call

    def write(self, data: bytes) -> None:
        """Send bytes of an answer. Never waits; see `full`."""
        self._transport.write(data)

    def closes_after(self, request: Request) -> bool:
        """Whether the connection ends with the answer to this request."""
        return not request.keep_alive or not request.whole or self._server.stopping

    def answered(self, exchange: Exchange) -> None:
        """All of the answer has been written."""
        self.exchange = None
        self.half_chunk = False
        if exchange.close:
            self._end(gently=not exchange.request.whole or bool(self._ahead))
            return
        self.deadline = time.monotonic() + self._server.settings.client_keep_alive_s
        if self._arrived or self._ahead or self._read_paused:
            self._go_on()
        elif self._half_closed:
            self._end(gently=False)

    def break_off(self, *, reset: bool = False) -> None:
        """Close without the end that length or chunks promised. What the client has not read yet still goes out.

        reset: nothing was promised, so that only a reset can tell.
        """
        self.exchange = None
        self._deaf = True
        if reset:
            sock = self._transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
            return
        self.deadline = time.monotonic() + self._server.settings.idle_timeout_s
        self._transport.close()

    def pause(self) -> None:
        """Read no more until `resume`: the client has to wait."""
        if not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._read_paused:
            self._read_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    @property
    def peer(self) -> str:
        """The client's address."""
        if self._peer is None:  # it costs a system call, and only the log asks
            peer = self._transport.get_extra_info("peername")
            self._peer = str(peer[0]) if peer else ""
        return self._peer

    @property
    def scheme(self) -> str:
        """http or https."""
        return self._server.scheme

    # What the server calls

    def expired(self, now: float) -> None:
        """The deadline is over."""
        self.deadline = NEVER
        if self._deaf and self.exchange is None:
            self._transport.abort()
        elif self.exchange is not None:
            self.exchange.expired(now)
        elif self._reading is not None:
            limits = self._server.settings
            if self._reading.method:
                message = f"the rest of the body did not come within {limits.idle_timeout_s:g} s"
            else:
                message = f"the request's head did not come within {limits.client_head_timeout_s:g} s"
            self._object(Objection(408, "client_stalled", message))
        else:
            self._end(gently=False)

    def stop(self) -> None:
        """Take no more requests."""
        if self.exchange is None and self._reading is None and not self._deaf:
            self._end(gently=False)

    def abort(self) -> None:
        """Close at once, whatever was not sent."""
        self._transport.abort()

    def refuse_all(self) -> None:
        """There are too many connections: say so, and close."""
        message = f"{self._server.settings.max_connections} clients are connected, the limit --router-max-connections"
        self._object(Objection(503, "too_many_connections", message))

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.deadline = time.monotonic() + self._server.settings.client_keep_alive_s
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self._transport.abort()
            return
        exchange = self.exchange
        if exchange is None or not exchange.request.whole:
            self._read(data)
        else:
            self._ahead.append(data)
            self._ahead_bytes += len(data)
            if self._ahead_bytes > MAX_AHEAD_BYTES:
                self.pause()

    def eof_received(self) -> bool:
        """The client ended its sending: it left, or waits for its answers."""
        exchange = self.exchange
        self._half_closed = True
        waits = (exchange is not None and exchange.request.whole) or bool(self._arrived)
        if not waits or self._lingers or self._transport.get_extra_info("sslcontext") is not None:
            return False
        return self._find_out()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._arrived.clear()
        self._ahead.clear()
        self._reading = None
        exchange, self.exchange = self.exchange, None
        self._parser = None  # it holds this connection, and would keep it until the garbage is collected
        self._server.closed(self)
        if exchange is not None:
            exchange.on_client_left()

    def pause_writing(self) -> None:
        self.full = True
        if self.exchange is not None:
            self.exchange.on_client_full()

    def resume_writing(self) -> None:
        self.full = False
        if self.exchange is not None:
            self.exchange.on_client_ready()

    # Reading

    def _read(self, data: bytes) -> None:
        in_head = self._reading is None or not self._reading.method
        if in_head:
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
        while self.exchange is None:
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
        if self.exchange is None and not self._deaf:
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
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _begin(self, request: Request) -> None:
        self.deadline = NEVER
        exchange = self.exchange = self._server.exchange_for(self, request)
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

    # The end

    def _end(self, *, gently: bool) -> None:
        """Close once what was written went out. gently: the client may be sending, and must not be reset before it
        has read its answer."""
        self._deaf = True
        self._reading = None
        if self._transport.is_closing():
            return
        limits = self._server.settings
        if not gently or self._half_closed:
            self.deadline = time.monotonic() + limits.idle_timeout_s
            self._transport.close()
            return
        self._lingers = True
        self.deadline = time.monotonic() + LINGER_S
        self.resume()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _find_out(self) -> bool:
        """Whether a client that ended its sending still listens: it is sent bytes without a meaning, which one that is
        gone answers with a reset. A close and a half-close look the same until then."""
        exchange = self.exchange
        if sys.platform != "linux" or exchange is None:
            return False
        if not self._probed:
            if not exchange.status and not exchange.request.http_10:
                self._transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            elif self.half_chunk:
                self._transport.write(b"0")  # the first digit of the next chunk's size
            elif exchange.request.http_10:
                return False
            self._probed = True
        asyncio.get_running_loop().call_later(_LOOK_S[0], self._look, 0)
        return True

    def _look(self, times: int) -> None:
        if self._transport.is_closing():
            return
        sock = self._transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self._transport.abort()
            return
        times = min(times + 1, len(_LOOK_S) - 1)
        asyncio.get_running_loop().call_later(_LOOK_S[times], self._look, times)
