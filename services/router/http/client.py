"""A client's connection: lets its requests be answered, and ends.

Owns what is written to a client and how its connection ends, so that a client can neither take a part of an answer for
the whole nor lose one that it could have read. Knows no worker. There is no task and no timer here: the server's sweep
looks at `deadline`.
"""

import asyncio
import socket
import struct
import time
from typing import TYPE_CHECKING, cast

from services.router.http.exchange import Exchange
from services.router.http.half_close import find_out
from services.router.http.reading import CONTINUE, NEVER, RequestReader
from services.router.http.request import Objection, Request
from services.router.http.tcp import has_ended, is_closed

if TYPE_CHECKING:
    from services.router.http.server import Server

ASK_S = 1.0
"""How often a client whose body nobody takes is sent an interim answer, to see whether it is there."""
LINGER_S = 2.0
"""A client that was refused while it was sending gets so long to read the answer before the connection is closed."""


class ClientConnection(RequestReader):
    """One connection. The exchange calls `write`, `closes_after`, `answered`, `break_off`, `pause`, `resume`."""

    __slots__ = ("_ask_at", "_asked", "_lingers", "_peer", "half_chunk")

    def __init__(self, server: "Server") -> None:
        RequestReader.__init__(self, server)
        self.half_chunk = False
        """The client is being sent chunks, and between two of them now."""
        self._peer: str | None = None
        self._lingers = False
        self._asked = False
        """It is being found out whether the client has left."""
        self._ask_at = 0.0
        """Monotonic time from which a client whose body nobody takes is asked again whether it is there."""

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
        if self._arrived or self._ahead or self.paused:
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

    def look(self, now: float) -> None:
        """Whether the client ended its sending while nothing is read; what it had sent before may be unread yet."""
        exchange = self.exchange
        sock = self._transport.get_extra_info("socket")
        if exchange is None or sock is None:
            return
        if is_closed(sock):
            self._transport.abort()
        elif has_ended(sock):
            if not self._asked and not self._find_out(exchange):
                self._transport.abort()
        elif now >= self._ask_at:
            # Its end may stand behind what it has sent and nobody takes: who is gone resets when something comes.
            request = exchange.request
            if self._ask_at and not (exchange.status or request.whole or request.http_10 or self.full):
                self._transport.write(CONTINUE)
            self._ask_at = now + ASK_S

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

    def eof_received(self) -> bool:
        """The client ended its sending: it left, or waits for its answers."""
        exchange = self.exchange
        self._half_closed = True
        waits = exchange is not None and (exchange.request.whole or bool(self._arrived))
        if not waits or self._lingers or self._transport.get_extra_info("sslcontext") is not None:
            return False
        assert exchange is not None
        return self._asked or self._find_out(exchange)

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
        else:
            self._go_on()

    def _find_out(self, exchange: Exchange) -> bool:
        self._asked = True
        return find_out(
            self._transport,
            begun=bool(exchange.status),
            half_chunk=self.half_chunk,
            http_10=exchange.request.http_10,
        )

    # The end

    def _end(self, *, gently: bool) -> None:
        """Close once what was written went out. gently: the client may be sending, and must not be reset before it
        has read its answer."""
        self._deaf = True
        self._reading = None
        limits = self._server.settings
        if self._transport.is_closing():
            self.deadline = time.monotonic() + limits.idle_timeout_s
            return
        if not gently or self._half_closed:
            self.deadline = time.monotonic() + limits.idle_timeout_s
            self._transport.close()
            return
        self._lingers = True
        self.deadline = time.monotonic() + LINGER_S
        self.resume()
        if self._transport.can_write_eof():
            self._transport.write_eof()
