"""The HTTP server: uvicorn with sockets bound by us, no signal handlers of its own, and a limit on request heads.

The only file that imports uvicorn. Never knows what a request is for.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from furlong.addresses import join_host_port
from furlong.rpc import PortTaken

KEEP_ALIVE_S = 75
"""How long an unused client connection is kept: longer than clients keep theirs (aiohttp: 15 s), so they end it."""
START_TIMEOUT_S = 10.0
BACKLOG = 4096
TOO_LARGE = b'{"error":{"type":"head_too_large","message":"request line and headers must have at most %d bytes"}}'


class ClientConnection(HttpToolsProtocol):
    """A client's connection. Adds to each request's scope, under `extensions`, what HTTP has and ASGI lacks:

    furlong.target: the request target as it was sent, byte for byte.
    furlong.upgrade: whether the client wants another protocol.
    furlong.break_off: a function that ends the connection in the midst of an answer, so that the client cannot take
    what it got for the whole.
    furlong.head_too_large: whether request line and headers are larger than allowed. One that has not ended by then is
    refused right here.
    """

    max_head_bytes = 64 * 1024
    _head_bytes = 0  # since the read after the one that the head began in
    _read_bytes = 0  # in the newest read
    _in_head = True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        size_bytes = self._head_bytes + self._read_bytes
        if size_bytes > self.max_head_bytes:  # of which other parts of what was read may make up the most
            size_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        cast(dict[str, Any], self.scope)["extensions"] = {  # Any: ASGI's open table
            "furlong.target": self.url,
            "furlong.upgrade": self.parser.should_upgrade(),
            "furlong.break_off": self._break_off,
            "furlong.head_too_large": size_bytes > self.max_head_bytes,
        }
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._read_bytes = len(data)
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            body = TOO_LARGE % self.max_head_bytes
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)
            )
            self.transport.close()

    def _break_off(self) -> None:
        """Close without the end that length or chunks promised. What the client has not read yet still goes out."""
        self.cycle.disconnected = True
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, which the process has itself, and without a tick."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()

    def stop(self) -> None:
        """Stop accepting and drain."""
        self.should_exit = True
        self._exit.set()

    async def main_loop(self) -> None:
        await self._exit.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


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


@contextlib.asynccontextmanager
async def serve_http(
    app: Any,  # Any: an ASGI callable; uvicorn's own type for it is a union of private ones
    sock: socket.socket,
    *,
    max_head_bytes: int,
    drain_s: float,
) -> AsyncGenerator["asyncio.Task[None]"]:
    """Answer on a listening socket while inside; the task that does. Leaving it stops accepting, waits up to drain_s
    seconds for running requests, and cancels the rest."""
    protocol = type("LimitedClientConnection", (ClientConnection,), {"max_head_bytes": max_head_bytes})
    config = uvicorn.Config(
        app,
        http=protocol,
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, int(drain_s)),
        backlog=BACKLOG,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="http_server")
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.started and not task.done():  # noqa: ASYNC110  uvicorn offers nothing to wait for
                await asyncio.sleep(0.002)
        if task.done():
            task.result()
        yield task
    finally:
        server.stop()
        await task
