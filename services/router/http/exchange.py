"""A request and its answer, whoever gives it: what is known of it afterwards, and what its connection calls.

Owns no socket: it writes to the client's connection and says there when it is over.
"""

import time
from typing import TYPE_CHECKING, Protocol

from services.router.http.answers import error_answer
from services.router.http.request import Objection, Request
from services.router.watch.ids import is_request_id, new_request_id
from services.router.workers.workers import Worker

if TYPE_CHECKING:
    from services.router.http.client import ClientConnection


class Observer(Protocol):
    """Who is told of what happened. Cheap, and never raises."""

    def finished(self, exchange: "Exchange", /) -> None:
        """A request is over; called exactly once for each."""

    def connection_opened(self) -> None:
        """A client came."""

    def connection_closed(self) -> None:
        """A client went."""

    def retry(self, kind: str, /) -> None:
        """A request is tried on another worker, or on another connection, because of this."""


class NoObserver:
    """Looks away."""

    def finished(self, exchange: "Exchange", /) -> None:
        """Does nothing."""

    def connection_opened(self) -> None:
        """Does nothing."""

    def connection_closed(self) -> None:
        """Does nothing."""

    def retry(self, kind: str, /) -> None:
        """Does nothing."""


class Exchange:
    """One request's way. Subclasses answer it."""

    __slots__ = (
        "bytes_out",
        "close",
        "ended",
        "error",
        "error_message",
        "first_byte",
        "num_tries",
        "observer",
        "over",
        "queued_s",
        "request",
        "request_id",
        "sent",
        "started",
        "status",
        "to",
        "worker",
    )

    def __init__(self, to: "ClientConnection", request: Request, observer: Observer) -> None:
        self.to = to
        self.request = request
        self.observer = observer
        self.close = False
        """The client's connection ends with this answer. Decided when its head is written."""
        self.over = False
        self.status = 0
        """What the client was answered; 0: no head was sent."""
        self.worker: Worker | None = None
        """The last one that it was tried on."""
        given = request.request_id
        self.request_id = given if given is not None and is_request_id(given) else new_request_id()
        self.bytes_out = 0
        self.started = time.monotonic()
        self.sent = 0.0
        self.first_byte = 0.0
        self.ended = 0.0
        self.queued_s = 0.0
        self.num_tries = 0
        self.error = ""
        self.error_message = ""

    @property
    def method(self) -> str:
        """As in the request line."""
        return self.request.method

    @property
    def path(self) -> str:
        """Without query."""
        return self.request.place.path

    @property
    def path_class(self) -> str:
        """What it is counted under."""
        return self.request.place.path_class

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The request's; names in lower case."""
        return self.request.headers

    @property
    def bytes_in(self) -> int:
        """Of the request's body."""
        return self.request.size_bytes

    @property
    def client(self) -> str:
        """The client's address."""
        return self.to.peer

    def start(self) -> None:
        """Begin to answer."""
        raise NotImplementedError

    def on_body(self) -> None:
        """More of the body is there, of a request that was not whole when it began."""

    def on_body_end(self) -> None:
        """The body is whole."""

    def on_bad_body(self, objection: Objection) -> None:
        """The rest of the body cannot be taken."""
        if self.status:
            self.break_off(objection.kind, objection.message)
        else:
            self.close = True
            self.refuse(objection.status, objection.kind, objection.message)

    def on_client_full(self) -> None:
        """The client takes no more for now."""

    def on_client_ready(self) -> None:
        """The client takes more again."""

    def on_client_left(self) -> None:
        """The client is gone; its connection is closed."""
        self.error = self.error or "client_left"
        self.end()

    def expired(self, now: float) -> None:
        """The connection's deadline is over."""

    def cut_short(self) -> None:
        """The router stops: there is no more time for this request."""
        self.break_off("stopping", "the router is stopping")

    def end(self) -> None:
        """It is over; tells the observer, once."""
        if not self.over:
            self.over = True
            self.ended = time.monotonic()
            self.observer.finished(self)

    def refuse(self, status: int, kind: str, message: str, *, lines: tuple[bytes, ...] = (), **more: object) -> None:
        """Answer with an error of the router's own, and end."""
        self.error, self.error_message = kind, message
        self.status = status
        self.close = self.close or self.to.closes_after(self.request)
        data = error_answer(
            status,
            kind,
            message,
            lines=(b"x-request-id: %b\r\n" % self.request_id, *lines),
            close=self.close,
            bodiless=self.request.method == "HEAD",
            **more,
        )
        self.to.write(data)
        self.end()
        self.to.answered(self)

    def break_off(self, kind: str, message: str) -> None:
        """End amid the answer, so that the client cannot take what it got for the whole."""
        self.error, self.error_message = kind, message
        self.end()
        self.to.break_off()


class RefusedExchange(Exchange):
    """A request that is answered with its objection."""

    __slots__ = ()

    def start(self) -> None:
        """Answer, and close: what may follow on this connection was not understood."""
        objection = self.request.objection
        assert objection is not None
        self.close = True
        self.refuse(objection.status, objection.kind, objection.message)
