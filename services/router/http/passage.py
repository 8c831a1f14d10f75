"""One request's way to a worker and back, byte for byte, as the bytes come: a state machine, called from both sides.

Owns what may be sent twice: a request goes to another worker only if it cannot have reached the first, or if it is a
GET or HEAD that nothing was answered to. Keeps of an answer no more than a few buffers. Never waits.
"""

import time
from typing import TYPE_CHECKING

from services.router.http.answers import retry_after_s
from services.router.http.connections import ConnectTimeout, Exhausted, NotOpened, Refused
from services.router.http.exchange import Exchange
from services.router.http.headers import status_line, without_named
from services.router.http.request import Request
from services.router.http.sending import NEVER, Sending
from services.router.http.upstream import Connection, NothingAccepted, UpstreamError

if TYPE_CHECKING:
    from services.router.http.client import ClientConnection
    from services.router.http.proxy import Proxy


class Passage(Sending):
    """One request's way through."""

    __slots__ = ("_chunks_out", "_until_close")

    def __init__(self, to: "ClientConnection", request: Request, proxy: "Proxy") -> None:
        Sending.__init__(self, to, request, proxy)
        self._chunks_out = False
        """The answer's body goes to the client in chunks."""
        self._until_close = False
        """The answer's body ends with the client's connection."""

    # The answer

    def on_answer(self, connection: Connection, body: bytes) -> None:
        """The worker answered, or answered more."""
        if not self.status:
            self._begin_answer(connection, body)
            return
        to = self.to
        data = b"%x\r\n%b\r\n" % (len(body), body) if body and self._chunks_out else body
        if connection.complete:
            self.bytes_out += len(body)
            self._finish(connection, data + b"0\r\n\r\n" if self._chunks_out else data)
        elif data:
            self.bytes_out += len(body)
            to.write(data)
            now = time.monotonic()
            self._proxy.workers.heard(self._on)
            self._set_deadline(now + self._proxy.settings.idle_timeout_s)

    def _begin_answer(self, connection: Connection, body: bytes) -> None:
        request = self.request
        request.pieces = []  # it is not sent again
        self.status = connection.status
        self.first_byte = time.monotonic()
        self.close = self.to.closes_after(request)
        head = self._answer_head(connection)
        complete = connection.complete
        self.bytes_out = len(body)
        if body and request.method != "HEAD":
            if self._chunks_out:
                data = b"%b%x\r\n%b\r\n%b" % (head, len(body), body, b"0\r\n\r\n" if complete else b"")
            else:
                data = head + body
        else:
            data = head + b"0\r\n\r\n" if complete and self._chunks_out else head
        if complete:
            self._finish(connection, data)
            return
        self._proxy.workers.heard(self._on)
        self.to.half_chunk = self._chunks_out
        self.to.write(data)
        self._set_deadline(self.first_byte + self._proxy.settings.idle_timeout_s)

    def _answer_head(self, connection: Connection) -> bytes:
        status = connection.status
        lines = connection.lines
        if connection.named:
            lines = without_named(lines, connection.named)
        framing = b""
        length = connection.content_length
        if length is not None and not connection.chunked:
            if status not in (204, 304):
                framing = b"content-length: %b\r\n" % length
        elif status not in (204, 304) and self.request.method != "HEAD":
            if self.request.http_10:
                self._until_close = True
            else:
                self._chunks_out = True
                framing = b"transfer-encoding: chunked\r\n"
        return b"%b%bx-request-id: %b\r\n%b%b" % (
            status_line(status, connection.reason),
            b"".join(lines),
            connection.request_id or self.request_id,
            framing,
            b"connection: close\r\n\r\n" if self.close else b"\r\n",
        )

    def _finish(self, connection: Connection, data: bytes) -> None:
        """The worker answered all. A client that is slow to take the rest does not hold the worker."""
        worker = self._on
        workers = self._proxy.workers
        self.ended = now = time.monotonic()
        workers.heard(worker)
        workers.answered(worker, self.status)
        self._release()
        self._connection = None
        if self.request.whole:
            self._connections.put(connection, now)
        else:
            connection.close()
        to = self.to
        if data:
            to.write(data)
        self.over = True
        self.observer.finished(self)
        to.answered(self)

    def on_client_full(self) -> None:
        """The client takes no more for now: nor does the worker give more."""
        if self._connection is not None:
            self._connection.pause()

    def on_client_ready(self) -> None:
        """The client takes more again."""
        if self._connection is not None:
            self._connection.resume()
            self._set_deadline(time.monotonic() + self._proxy.settings.idle_timeout_s)

    # What goes wrong

    def _not_opened(self, error: NotOpened) -> None:
        worker = self._on
        if isinstance(error, Exhausted):
            seconds = b"retry-after: %d\r\n" % retry_after_s(self._proxy.settings)
            self.refuse(503, "router_exhausted", str(error), lines=(seconds,))
            return
        workers = self._proxy.workers
        workers.failed(worker, str(error))
        if isinstance(error, Refused):
            workers.gone(worker, str(error))
        worker.probe_soon.set()
        status = 504 if isinstance(error, ConnectTimeout) else 502
        self._failed(status, "worker_unreachable", str(error), resend=True)

    def on_error(self, connection: Connection, error: UpstreamError) -> None:
        """The worker broke the exchange."""
        worker = self._on
        self._connection = None
        unanswered = not connection.begun
        if self._used and unanswered:
            self._connections.distrust(connection)
        request = self.request
        whole = request.whole and not self._sending
        accepted = not isinstance(error, NothingAccepted)
        if self._used and not accepted:  # it was closed meanwhile; the worker never saw the request
            self.observer.retry("connection_closed")
            self._open()
            return
        message = f"{worker.url} {error}"
        self._proxy.workers.failed(worker, message)
        worker.probe_soon.set()
        resend = whole and (not accepted or (request.idempotent and unanswered))
        self._failed(502, "worker_broken", message, resend=resend)

    def _failed(self, status: int, kind: str, message: str, *, resend: bool) -> None:
        """A try gave no answer, or a part of one. resend: another worker may get the request."""
        self._release()
        if self.status:
            self.break_off(kind, message)
            return
        self._failure = (status, kind, message)
        self._tried.append(self._on)
        if resend and self.num_tries < self._proxy.settings.max_tries and time.monotonic() < self._to_end:
            self.observer.retry(kind)
            self._find()
        else:
            self._give_up()

    def _give_up(self) -> None:
        assert self._failure is not None
        status, kind, message = self._failure
        self.refuse(status, kind, message, worker=str(self.worker.url) if self.worker else "")

    def break_off(self, kind: str, message: str) -> None:
        """End amid the answer, so that the client cannot take what it got for the whole."""
        self._drop()
        self.error, self.error_message = kind, message
        self.end()
        self.to.break_off(reset=self._until_close)

    def refuse(self, status: int, kind: str, message: str, *, lines: tuple[bytes, ...] = (), **more: object) -> None:
        """Answer with an error of the router's own, and end."""
        self._drop()
        Exchange.refuse(self, status, kind, message, lines=lines, **more)

    def on_client_left(self) -> None:
        """The client is gone, and its request with it."""
        self._drop()
        Exchange.on_client_left(self)

    def cut_short(self) -> None:
        """The router stops: there is no more time for this request."""
        if self.status:
            self.break_off("stopping", "the router is stopping")
        else:
            seconds = b"retry-after: %d\r\n" % retry_after_s(self._proxy.settings)
            self.refuse(503, "stopping", "the router is stopping", lines=(seconds,))

    def expired(self, now: float) -> None:
        """A time limit is over: whose fault is it?"""
        settings = self._proxy.settings
        if now >= self._to_end:
            message = f"the request took longer than {settings.total_timeout_s:g} s, the limit --router-total-timeout-s"
            self._end_late(504, "total_timeout", message)
        elif self.worker is None or self._connection is None:
            self._set_deadline(NEVER)
        elif self.status and self.to.full:
            self._end_late(408, "client_stalled", f"the client took nothing for {settings.idle_timeout_s:g} s")
        elif not self.status and not self.request.whole and not self._connection.write_paused:
            message = f"{self.worker.url} was not sent the rest of the body for {settings.idle_timeout_s:g} s"
            self._end_late(408, "client_stalled", message)
        else:
            if self.status:
                error = f"was silent for {settings.idle_timeout_s:g} s amid its answer"
            elif self.request.whole:
                error = f"did not begin its answer within {settings.first_byte_timeout_s:g} s"
            else:
                error = f"took no more of the body for {settings.idle_timeout_s:g} s"
            message = f"{self.worker.url} {error}"
            self._proxy.workers.failed(self._on, message)
            self._end_late(504, "worker_late", message)

    def _end_late(self, status: int, kind: str, message: str) -> None:
        if self.status:
            self.break_off(kind, message)
        else:
            self.refuse(status, kind, message, worker=str(self.worker.url) if self.worker is not None else None)
