"""The HTTP server: takes clients' connections, sweeps over them for time limits, drains at the end.

Never knows what a request is for.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Protocol

from furlong.addresses import PortTaken, join_host_port
from services.router.http.client import ClientConnection
from services.router.http.exchange import Exchange
from services.router.http.front import Front
from services.router.http.request import Limits, Objection, Request
from services.router.http.tls import serving_context

BACKLOG = 4096
SWEEP_S = 0.25
"""Time limits are kept to this; there is no timer for a request or a connection."""
LATE_S = 0.5
"""A sweep that comes later than this judges nobody."""
REFUSED_SHARE = 16
"""One in so many of the most connections, and MIN_REFUSED at least, may be there besides, to be told that it is one too
many; more of them are closed without a word, for they take files too."""
MIN_REFUSED = 8
CLOSING_S = 1.0
"""What the last answers get to leave the process."""


class Accepting(Protocol):
    """What brings connections in."""

    def close(self) -> None:
        """Bring no more."""


class Server:
    """All connections of clients."""

    def __init__(self, front: Front) -> None:
        self.settings = settings = front.proxy.settings
        self.limits = Limits(settings.max_head_bytes, settings.max_url_bytes, settings.max_body_bytes)
        message = f"request line and headers must have at most {settings.max_head_bytes} bytes"
        self.head_too_large = Objection(431, "head_too_large", message)
        self.stopping = False
        self.scheme = "https" if settings.tls_cert else "http"
        self.context = serving_context(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        self.handshake_s = settings.client_head_timeout_s if settings.tls_cert else None
        self.num_open: Callable[[], int] = lambda: self.num_connections
        """Connections that count for the limit."""
        self.on_closed: Callable[[], None] | None = None
        """Called for each that ended."""
        self._front = front
        self._observer = front.proxy.observer
        self._connections: set[ClientConnection] = set()
        self._coming: set[ClientConnection] = set()
        """Those that were adopted, until they are told of as open."""
        self._refused: set[ClientConnection] = set()
        """Those that were one too many, while they read it."""
        self._changed = asyncio.Event()

    @property
    def num_connections(self) -> int:
        """Connections that are open here, or were adopted and are about to be."""
        return len(self._connections) + len(self._coming)

    def adopt(self, sock: socket.socket) -> Coroutine[None, None, None]:
        """Take a connection that was accepted elsewhere. It counts from now on; the rest is to be awaited, which raises
        OSError when it ends before it begins."""
        connection = ClientConnection(self)
        self._coming.add(connection)
        return self._adopt(connection, sock)

    async def _adopt(self, connection: ClientConnection, sock: socket.socket) -> None:
        try:
            if self.stopping:
                sock.close()
                raise ConnectionAbortedError("the router is stopping")
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, sock, ssl=self.context, ssl_handshake_timeout=self.handshake_s
            )
        finally:
            self._coming.discard(connection)

    def exchange_for(self, to: ClientConnection, request: Request) -> Exchange:
        """Who answers this request."""
        return self._front.exchange_for(to, request)

    def opened(self, connection: ClientConnection) -> None:
        """A client came."""
        self._coming.discard(connection)
        self._connections.add(connection)
        self._observer.connection_opened()
        if self.num_open() <= self.settings.max_connections:
            return
        self._connections.discard(connection)
        if len(self._refused) < max(MIN_REFUSED, self.settings.max_connections // REFUSED_SHARE):
            self._refused.add(connection)
            connection.refuse_all()
        else:
            connection.abort()

    def closed(self, connection: ClientConnection) -> None:
        """A client went."""
        self._connections.discard(connection)
        self._refused.discard(connection)
        self._observer.connection_closed()
        if self.on_closed is not None:
            self.on_closed()
        self._changed.set()

    async def sweep(self) -> None:
        """Tell connections whose deadline is over, or whose end nobody reads; runs until cancelled."""
        limits = self.settings
        shortest = min(
            limits.client_head_timeout_s,
            limits.client_keep_alive_s,
            limits.first_byte_timeout_s,
            limits.idle_timeout_s,
            limits.total_timeout_s or limits.idle_timeout_s,
        )
        sweep_s = min(SWEEP_S, shortest / 4)
        now = time.monotonic()
        was_late = False
        while True:
            before = now
            await asyncio.sleep(sweep_s)
            now = time.monotonic()
            was_late = now > before + sweep_s + LATE_S and not was_late
            if was_late:  # this process did not run: what came meanwhile is to be read before anybody is called late
                continue
            for connections in (self._connections, self._refused):
                for connection in [c for c in connections if c.deadline <= now or c.paused]:
                    if connection.deadline <= now:
                        connection.expired(now)
                    else:
                        connection.look(now)

    async def drain(self, drain_s: float) -> None:
        """Let requests end for so long; end the rest."""
        self.stopping = True
        for connection in list(self._connections):
            connection.stop()
        await self._until_none(drain_s)
        for connection in list(self._connections):
            if connection.exchange is not None:
                connection.exchange.cut_short()
            else:
                connection.stop()
        await self._until_none(CLOSING_S)
        for connection in (*self._connections, *self._refused):
            connection.abort()

    async def _until_none(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._connections:
                    self._changed.clear()
                    await self._changed.wait()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PortTaken naming the address."""
    bare = host.strip("[]")
    address = join_host_port(bare, port)
    try:
        family, kind, number, _, where = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, number)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise PortTaken(
            f"cannot listen on {address}: {error.strerror}. Is the port taken? --router-port 0 finds a free one."
        ) from error
    sock.setblocking(False)
    return sock


Accept = Callable[[Server], Awaitable[Accepting]]


def on_socket(sock: socket.socket) -> Accept:
    """Connections come in on a listening socket of this process."""

    async def accept(server: Server) -> Accepting:
        return await asyncio.get_running_loop().create_server(
            lambda: ClientConnection(server),
            sock=sock,
            backlog=BACKLOG,
            ssl=server.context,
            ssl_handshake_timeout=server.handshake_s,
        )

    return accept


@contextlib.asynccontextmanager
async def serve_http(front: Front, accept: Accept, *, drain_s: float) -> AsyncGenerator["asyncio.Task[None]"]:
    """Answer connections while inside; the task that watches the time limits. Leaving it stops accepting, waits up to
    drain_s seconds for running requests, and ends the rest."""
    server = Server(front)
    listener = await accept(server)
    task = asyncio.create_task(server.sweep(), name="sweep_connections")
    try:
        yield task
    finally:
        listener.close()
        await server.drain(drain_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
