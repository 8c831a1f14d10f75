"""A request's way to a worker: choosing or waiting for one, a connection to it, head and body.

Keeps of the body no more than a few buffers. Never waits: only to open a connection it has a task.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.router.http.answers import retry_after_s
from services.router.http.connections import Connections, NotOpened
from services.router.http.exchange import Exchange
from services.router.http.headers import request_head
from services.router.http.request import Request
from services.router.http.upstream import Connection, UpstreamError
from services.router.workers.workers import Refused as NotTaken
from services.router.workers.workers import State, Ticket, Worker

if TYPE_CHECKING:
    from services.router.http.client import ClientConnection
    from services.router.http.proxy import Proxy

JOIN_BYTES = 64 * 1024
"""Head and body are sent as one piece up to this size."""
BUFFER_BYTES = 256 * 1024
"""What is kept of a body while no connection is open to send it on."""
NEVER = float("inf")
BODY_METHODS = frozenset(("POST", "PUT", "PATCH"))


class Sending(Exchange):
    """The half of a passage that goes to the worker."""

    __slots__ = (
        "_connection",
        "_connections",
        "_failure",
        "_on",
        "_opening",
        "_proxy",
        "_sending",
        "_taken",
        "_ticket",
        "_to_end",
        "_tried",
        "_used",
        "_waits_since",
        "_want",
    )

    def __init__(self, to: "ClientConnection", request: Request, proxy: "Proxy") -> None:
        Exchange.__init__(self, to, request, proxy.observer)
        self._proxy = proxy
        self._connection: Connection | None = None
        self._connections: Connections
        self._on: Worker
        """The worker that is tried."""
        self._opening: asyncio.Task[None] | None = None
        self._ticket: Ticket | None = None
        self._taken = False
        """The worker counts this request as in flight."""
        self._want = proxy.want_of(request)
        self._tried: list[Worker] = []
        self._failure: tuple[int, str, str] | None = None
        """Of the last try."""
        self._sending = False
        """The head was sent to the worker, and the body is sent as it comes."""
        self._used = False
        """The connection had been used before."""
        total_s = proxy.settings.total_timeout_s
        self._to_end = self.started + total_s if total_s else NEVER

    # Finding a worker

    def start(self) -> None:
        """Give it to a worker, or let it wait for one."""
        self._find()

    def _find(self) -> None:
        worker = self._proxy.workers.take(self._want, but_not=self._tried)
        if worker is not None:
            self._try(worker)
            return
        but_not: tuple[Worker, ...] = ()
        if self._tried:
            ready = [w for w in self._proxy.workers.all() if w.state is State.READY]
            but_not = tuple(w for w in ready if w in self._tried)
            if ready and len(but_not) == len(ready):
                self._give_up()  # each worker that is ready has been tried
                return
        self._queue(but_not)

    def _queue(self, but_not: Sequence[Worker]) -> None:
        self._waits_since = now = time.monotonic()
        deadline = now + self._proxy.settings.queue_timeout_s - self.queued_s
        self._set_deadline(NEVER)
        try:
            ticket = self._proxy.workers.queue(
                self._want, self._served, self._not_served, but_not=but_not, deadline=min(deadline, self._to_end)
            )
        except NotTaken as refused:
            self._not_served(refused)
            return
        if ticket.waiting:  # it may have been served meanwhile
            self._ticket = ticket

    def _served(self, worker: Worker) -> None:
        self._ticket = None
        self.queued_s += time.monotonic() - self._waits_since
        self._try(worker)

    def _not_served(self, refused: NotTaken) -> None:
        self._ticket = None
        self.queued_s += time.monotonic() - self._waits_since
        if time.monotonic() >= self._to_end:
            self.expired(self._to_end)
            return
        seconds = b"retry-after: %d\r\n" % retry_after_s(self._proxy.settings)
        self.refuse(503, refused.kind, str(refused), lines=(seconds,))

    def _try(self, worker: Worker) -> None:
        """worker: counts this request as in flight."""
        self.worker = self._on = worker
        self._taken = True
        self.num_tries += 1
        self._connections = self._proxy.connections_to(worker)
        request = self.request  # if it is not whole it can be sent only once
        connection = self._connections.take(idempotent=request.idempotent) if request.whole else None
        if connection is None:
            self._open()
        else:
            self._send(connection, used=True)

    def _open(self) -> None:
        self._set_deadline(NEVER)
        self._opening = asyncio.get_running_loop().create_task(self._open_connection())

    async def _open_connection(self) -> None:
        try:
            connection = await self._connections.open()
        except NotOpened as error:
            self._opening = None
            self._not_opened(error)
            return
        self._opening = None
        if self._on.state is State.READY:
            self._send(connection, used=False)
            return
        connection.close()  # admission was taken away meanwhile: whoever did so relies on nothing new arriving
        self._release()
        self.num_tries -= 1
        self._find()

    # The request

    def _send(self, connection: Connection, *, used: bool) -> None:
        self._connection = connection
        self._used = used
        request = self.request
        body = request.body
        head = self._head(body)
        connection.begin(self, request.method)
        self.sent = now = time.monotonic()
        if request.whole:
            if len(body) <= JOIN_BYTES:
                connection.write(head + body)
            else:
                connection.write(head)
                connection.write(body)
            self._set_deadline(now + self._proxy.settings.first_byte_timeout_s)
            return
        self._sending = True
        request.pieces = []
        connection.write(head)
        if body:
            self._pass_on(connection, body)
        self._set_deadline(now + self._proxy.settings.idle_timeout_s)
        if not connection.write_paused:
            self.to.resume()

    def _head(self, body: bytes) -> bytes:
        request = self.request
        length = request.content_length
        if request.whole and (body or request.method in BODY_METHODS):
            length = len(body)
        elif request.whole and length is None:
            length = -1
        lines = self._proxy.lines_for(self._on, request)
        lines.append(b"x-request-id: %b\r\n" % self.request_id)
        return request_head(request.method, request.target, lines, host=self._connections.host, content_length=length)

    def _pass_on(self, connection: Connection, piece: bytes) -> None:
        if self.request.content_length is None:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        connection.write(piece)
        if connection.write_paused:
            self.to.pause()

    def on_body(self) -> None:
        """The client sent more."""
        connection = self._connection
        if self._sending and connection is not None:
            self._pass_on(connection, self.request.take_body())
            if not self.status:
                self._set_deadline(time.monotonic() + self._proxy.settings.idle_timeout_s)
            return
        if self.request.size_bytes > BUFFER_BYTES:
            self.to.pause()

    def on_body_end(self) -> None:
        """The client sent all of it."""
        connection = self._connection
        if self._sending and connection is not None:
            if self.request.content_length is None:
                connection.write(b"0\r\n\r\n")
            if not self.status:
                self._set_deadline(time.monotonic() + self._proxy.settings.first_byte_timeout_s)

    def on_writable(self, connection: Connection) -> None:
        """The worker takes more again."""
        if not self.request.whole:
            if not self.status:
                self._set_deadline(time.monotonic() + self._proxy.settings.idle_timeout_s)
            self.to.resume()

    # What the other half does

    def on_answer(self, connection: Connection, body: bytes) -> None:
        """The worker answered, or answered more."""
        raise NotImplementedError

    def on_error(self, connection: Connection, error: UpstreamError) -> None:
        """The worker broke the exchange."""
        raise NotImplementedError

    def _not_opened(self, error: NotOpened) -> None:
        raise NotImplementedError

    def _give_up(self) -> None:
        raise NotImplementedError

    # Letting go

    def _drop(self) -> None:
        """Let go of everything that is held for this request."""
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._release()

    def _release(self) -> None:
        if self._taken:
            self._taken = False
            self._proxy.workers.give_back(self._on)

    def _set_deadline(self, deadline: float) -> None:
        self.to.deadline = deadline if deadline < self._to_end else self._to_end
