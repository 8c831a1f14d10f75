"""One HTTP/1.1 connection to a worker, from the router's side: sends a request, hands over its answer as it comes.

Carries one exchange at a time and knows no worker and no client: whoever began the exchange is called. Keeps nothing of
an answer: who cannot take more says `pause`. Bytes of a body pass as they are; nothing is decompressed.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from services.router.http.headers import NOT_TO_CLIENT
from services.router.http.tcp import acked_bytes, has_ended

MAX_HEAD_BYTES = 64 * 1024


class UpstreamError(Exception):
    """The worker did not answer as HTTP wants it; the message says what happened."""


class NothingAccepted(UpstreamError):
    """The worker had closed the connection before one byte of the request reached its host: it cannot have run."""


class Asker(Protocol):
    """Who began an exchange. Called synchronously, and no more once the exchange is over."""

    def on_answer(self, connection: "Connection", body: bytes) -> None:
        """The head is there, and these bytes of the body; `connection.complete` once they are the last."""

    def on_error(self, connection: "Connection", error: UpstreamError) -> None:
        """The exchange failed. The connection is closed."""

    def on_writable(self, connection: "Connection") -> None:
        """The worker takes more of the request's body again."""


class Connection(asyncio.Protocol):
    """One connection. Use: `begin`, `write`..., then `finish` once `complete`; or `close` at any time."""

    __slots__ = (
        "_busy",
        "_exchange_start_bytes",
        "_framing_bytes",
        "_head_bytes",
        "_is_head",
        "_parser",
        "_pieces",
        "_read_paused",
        "_transport",
        "_until_close",
        "_written_bytes",
        "asker",
        "chunked",
        "complete",
        "content_length",
        "head_done",
        "headers",
        "idle_s",
        "idle_since",
        "keep_alive",
        "lines",
        "lost",
        "named",
        "on_idle_end",
        "reason",
        "request_id",
        "status",
        "write_paused",
    )

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self.asker: Asker | None = None
        self._busy = False
        self._read_paused = False
        self._written_bytes = 0
        self.write_paused = False
        self.lost = False
        self.idle_since = 0.0
        """Monotonic time since which it is unused."""
        self.idle_s = 0.0
        """How long it had been unused when it was taken again."""
        self.on_idle_end: Callable[[Connection], None] | None = None
        """Called when the worker closes the connection while it is unused."""
        self.complete = False
        self._pieces: list[bytes] = []

    # What the one who asks calls

    def begin(self, asker: Asker, method: str) -> None:
        """Start an exchange; the connection must be fresh or reusable."""
        self.asker = asker
        self.on_idle_end = None
        self._is_head = method == "HEAD"
        self._busy = True
        self._exchange_start_bytes = self._written_bytes
        self._head_bytes = 0
        self._framing_bytes = 0
        """What came behind the head since there was a piece of a body: chunk extensions or trailers."""
        self._until_close = False
        self.complete = False
        self.head_done = False
        self.keep_alive = False
        self._clear_head()

    def _clear_head(self) -> None:
        self.status = 0
        self.reason = b""
        self.lines: list[bytes] = []
        """The headers that travel on, as lines."""
        self.content_length: bytes | None = None
        self.chunked = False
        self.named: list[bytes] = []
        """Values of Connection headers."""
        self.request_id: bytes | None = None

    def write(self, data: bytes) -> None:
        """Send bytes of the request. Never waits; see `write_paused`. Once the connection is lost it does nothing."""
        if not self.lost:
            self._written_bytes += len(data)
            self._transport.write(data)

    def pause(self) -> None:
        """Read no more until `resume`: the worker has to wait."""
        if not self._read_paused and not self.lost:
            self._read_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._read_paused:
            self._read_paused = False
            if not self.lost and not self._transport.is_closing():
                self._transport.resume_reading()

    def finish(self) -> None:
        """The exchange is over and the connection waits for the next one."""
        self.asker = None
        self._busy = False
        if self._read_paused:
            self.resume()

    @property
    def reusable(self) -> bool:
        """Whether the answer ended so that another request can follow."""
        return self.complete and self.keep_alive and not self.lost and not self._transport.is_closing()

    @property
    def begun(self) -> bool:
        """Whether any byte of an answer came."""
        return self._head_bytes > 0

    def close(self) -> None:
        """Close at once; what is not sent yet is dropped, and nobody is called any more."""
        self.asker = None
        if not self.lost:
            self._transport.abort()

    def has_ended(self) -> bool:
        """Whether the worker closed the connection, though the event loop may not have come to it yet."""
        sock = self.sock()
        return self.lost or (sock is not None and has_ended(sock))

    def sock(self) -> socket.socket | None:
        """The socket, to look at or to set."""
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        return sock

    def _fail(self, error: UpstreamError) -> None:
        asker = self.asker
        self.close()
        if asker is not None and not self.complete:
            asker.on_error(self, error)

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._busy or self.complete:
            self.keep_alive = False
            self._idle_end()
            self.close()
            return
        if not self.head_done:
            self._head_bytes += len(data)
        error: UpstreamError | None = None
        parser = self._parser
        if parser is None:
            return
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            error = UpstreamError("changed to another protocol")
        except httptools.HttpParserCallbackError as wrong:
            error = UpstreamError(f"sent an answer that cannot be passed on: {wrong.__context__}")
        except httptools.HttpParserError as wrong:
            error = UpstreamError(f"sent what is not HTTP: {wrong}")
        if error is not None:
            self.keep_alive = False
        if self.head_done:
            pieces = self._pieces
            if pieces:
                body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                self._pieces = []
                self._framing_bytes = 0
            else:
                body = b""
                self._framing_bytes += len(data)
                if self._framing_bytes > MAX_HEAD_BYTES and not self.complete:
                    error = UpstreamError(f"sent more than {MAX_HEAD_BYTES} bytes of trailers or chunk extensions")
            asker = self.asker
            if asker is not None and (body or self.complete or error is None):
                asker.on_answer(self, body)
        elif error is None and self._head_bytes > MAX_HEAD_BYTES:
            error = UpstreamError(f"sent a head of more than {MAX_HEAD_BYTES} bytes")
        if error is not None:
            self._fail(error)

    def eof_received(self) -> None:
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._parser = None  # it holds this connection, and would keep it until the garbage is collected
        self._ended(exc)

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.asker is not None:
            self.asker.on_writable(self)

    def _ended(self, exc: Exception | None) -> None:
        """The worker closed the connection, cleanly (exc is None) or not."""
        if not self._busy:
            self._idle_end()
            return
        asker = self.asker
        if self.complete or asker is None:
            return
        if exc is None and self.head_done and self._until_close:
            self.complete = True
            asker.on_answer(self, b"")
        elif exc is None and not self.begun and self._none_accepted():
            self._fail(NothingAccepted("closed the connection as the request was on its way"))
        else:
            when = "in the middle of its answer" if self.head_done else "without an answer"
            self._fail(UpstreamError(f"closed the connection {when}{f' ({exc})' if exc else ''}"))

    def _idle_end(self) -> None:
        if self.on_idle_end is not None:
            tell, self.on_idle_end = self.on_idle_end, None
            tell(self)

    def _none_accepted(self) -> bool:
        """Whether the worker's host took no byte of this request: its end-of-stream says how far it had read.

        That the kernel's count includes the SYN leaves one byte of doubt, and one byte is no request. Under TLS the
        kernel counts more bytes than were written here, so that nothing is ever taken for proven.
        """
        sock = self.sock()
        acked = acked_bytes(sock) if sock is not None else None
        return acked is not None and acked <= self._exchange_start_bytes + 1

    # httptools' calls

    def on_status(self, reason: bytes) -> None:
        if not self.head_done:
            self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:  # a trailer
            return
        low = name.lower()
        if low not in NOT_TO_CLIENT:
            self.lines.append(b"%b: %b\r\n" % (name, value))
        elif low == b"content-length":
            self.content_length = value
        elif low == b"transfer-encoding":
            self.chunked = True
            if value.strip().lower() != b"chunked":  # the coding is between us and the worker, and ends here
                raise ValueError(f"transfer-encoding {value[:100]!r}")
        elif low == b"connection":
            self.named.append(value)
        elif low == b"x-request-id":
            self.request_id = value

    def on_headers_complete(self) -> None:
        if self.head_done:  # bytes behind the answer
            self.keep_alive = False
            return
        assert self._parser is not None
        status = self._parser.get_status_code()
        if not 200 <= status < 600:
            if 100 <= status < 200 and status != 101:  # an interim answer: the real one follows
                self._clear_head()
                return
            raise ValueError(f"status {status}")
        self.status = status
        self.head_done = True
        self._until_close = (
            self.content_length is None and not self.chunked and not self._is_head and status not in (204, 304)
        )
        if self._is_head:  # the parser waits for a body that does not come: this connection ends here
            self.complete = True

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._pieces.append(body)

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # bytes behind the answer

    def on_message_complete(self) -> None:
        if self.head_done and not self.complete:
            self.complete = True
            self.keep_alive = self._parser is not None and self._parser.should_keep_alive()
