"""One HTTP/1.1 connection to a worker, from the router's side: sends a request, gives its answer as it comes.

Carries one exchange at a time and knows no worker and no client. Keeps no more of an answer than BUFFER_BYTES: beyond
that the worker has to wait. Bytes of a body pass as they are; nothing is decompressed.
"""

import asyncio
import socket
import struct
import sys
from collections.abc import Callable
from typing import cast

import httptools

BUFFER_BYTES = 256 * 1024
MAX_HEAD_BYTES = 64 * 1024
_BYTES_ACKED_OFFSET = 120  # of tcpi_bytes_acked in struct tcp_info, linux/tcp.h


class UpstreamError(Exception):
    """The worker did not answer as HTTP wants it; the message says what happened."""


class NothingAccepted(UpstreamError):
    """The worker had closed the connection before one byte of the request reached its host: it cannot have run."""


class AnswerLate(UpstreamError):
    """The worker's answer did not begin in time."""


class Connection(asyncio.Protocol):
    """One connection. Use: `begin`, `write`..., `head`, `read` until it gives b"", then `reusable`; or `close`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._wake: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._write_paused = False
        self._read_paused = False
        self.lost = False
        self._busy = False
        self._written_bytes = 0
        self.idle_since = 0.0
        """Monotonic time since which it is unused."""
        self.idle_s = 0.0
        """How long it had been unused when it was taken again."""
        self.on_idle_end: Callable[[Connection], None] | None = None
        """Called when the worker closes the connection while it is unused."""
        self._clear()

    def _clear(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self._method = ""
        self._head_done = False
        self._head_bytes = 0
        self._until_close = False
        self._keep_alive = False
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._error: UpstreamError | None = None
        self._exchange_start_bytes = self._written_bytes

    # What the proxy calls

    def begin(self, method: str) -> None:
        """Start an exchange; the connection must be fresh or reusable."""
        self._clear()
        self._method = method
        self._busy = True
        self.on_idle_end = None

    def write(self, data: bytes) -> None:
        """Send bytes of the request. Never waits; see `drain`. Once the connection is lost it does nothing, and `head`
        says so."""
        if not self.lost:
            self._written_bytes += len(data)
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the worker takes more. Returns at once when the connection is lost."""
        while self._write_paused and not self.lost:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    async def head(self) -> None:
        """Wait until `status` and `headers` are there. Raises UpstreamError."""
        while not self._head_done:
            await self._something()

    async def read(self) -> bytes:
        """The bytes of the body that came meanwhile, waiting for some; b"": the end. Raises UpstreamError."""
        while not self._chunks:
            if self.complete:
                return b""
            await self._something()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if self._read_paused:
            self._read_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()
        return data

    def fail(self, error: UpstreamError) -> None:
        """End the exchange with an error, once what came before it has been read, and close the connection."""
        if self._error is None and not self.complete:
            self._error = error
        self._wake_up()
        self.close()

    def finish(self) -> None:
        """The exchange is over and the connection waits for the next one."""
        self._busy = False

    @property
    def reusable(self) -> bool:
        """Whether the answer ended so that another request can follow."""
        return self.complete and self._keep_alive and not self.lost and not self._transport.is_closing()

    @property
    def begun(self) -> bool:
        """Whether any byte of an answer came."""
        return self._head_bytes > 0

    def close(self) -> None:
        """Close at once; what is not sent yet is dropped."""
        if not self.lost:
            self._transport.abort()

    def peer_ip(self) -> str:
        """The address that the connection went to."""
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    async def _something(self) -> None:
        """Wait for the next event of the connection."""
        if self._error is not None:
            raise self._error
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sys.platform == "linux":  # a worker whose machine vanished says nothing, ever
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def data_received(self, data: bytes) -> None:
        if not self._busy or self.complete:
            self.fail(UpstreamError("sent bytes that belong to no answer"))
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail(UpstreamError("changed to another protocol"))
            return
        except httptools.HttpParserError as error:
            self.fail(UpstreamError(f"sent what is not HTTP: {error}"))
            return
        if not self._head_done and self._head_bytes > MAX_HEAD_BYTES:
            self.fail(UpstreamError(f"sent a head of more than {MAX_HEAD_BYTES} bytes"))
        self._wake_up()

    def eof_received(self) -> None:
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(exc)
        self.lost = True
        self._wake_up()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _ended(self, exc: Exception | None) -> None:
        """The worker closed the connection, cleanly (exc is None) or not."""
        if not self._busy and self.on_idle_end is not None:
            tell, self.on_idle_end = self.on_idle_end, None
            tell(self)
        if not self._busy or self.complete or self._error is not None:
            return
        if exc is None and self._head_done and self._until_close:
            self.complete = True
        elif exc is None and not self.begun and self._none_accepted():
            self._error = NothingAccepted("closed the connection as the request was on its way")
        else:
            when = "in the middle of its answer" if self._head_done else "without an answer"
            self._error = UpstreamError(f"closed the connection {when}{f' ({exc})' if exc else ''}")
        self._wake_up()

    def _none_accepted(self) -> bool:
        """Whether the worker's host took no byte of this request: its end-of-stream says how far it had read.

        That the kernel's count includes the SYN leaves one byte of doubt, and one byte is no request.
        """
        sock = self._transport.get_extra_info("socket")
        if sys.platform != "linux" or sock is None:
            return False
        try:
            described = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED_OFFSET + 8)
        except OSError:
            return False
        if len(described) < _BYTES_ACKED_OFFSET + 8:
            return False
        (acked_bytes,) = struct.unpack_from("=Q", described, _BYTES_ACKED_OFFSET)
        return bool(acked_bytes <= self._exchange_start_bytes + 1)

    # httptools' calls

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # else a trailer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:  # an interim answer: the real one follows
            self.headers = []
            return
        if not 200 <= status < 600:
            raise ValueError(f"status {status}")
        self.status = status
        self._head_done = True
        names = {name for name, _ in self.headers}
        framed = b"content-length" in names or b"transfer-encoding" in names
        bodiless = self._method == "HEAD" or status in (204, 304)
        self._until_close = not framed and not bodiless
        if self._method == "HEAD":  # the parser waits for a body that does not come: this connection ends here
            self.complete = True

    def on_body(self, body: bytes) -> None:
        if self.complete:
            return
        self._chunks.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > BUFFER_BYTES and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._head_done and not self.complete:
            self.complete = True
            self._keep_alive = self._parser.should_keep_alive()
