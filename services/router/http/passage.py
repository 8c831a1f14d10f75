"""One request's way to a worker and back, byte for byte, as the bytes come.

Owns what may be sent twice: a request goes to another worker only if it cannot have reached the first, or if it is a
GET or HEAD that nothing was answered to. Keeps of each direction no more than a few buffers.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.router.http.answers import answer_error, answer_unavailable
from services.router.http.asgi import ClientLeft, ClientRequest, Leash, Send
from services.router.http.connections import Connections, ConnectTimeout, NotOpened, Refused
from services.router.http.headers import request_head, response_headers
from services.router.http.upstream import AnswerLate, Connection, NothingAccepted, UpstreamError
from services.router.settings import RouterSettings
from services.router.workers.workers import NoReadyWorker, QueueFull, Worker, Workers

log = structlog.get_logger()


class ClientStalled(UpstreamError):
    """The client stopped sending its body."""


@dataclass(frozen=True)
class Failure:
    """Why an attempt on a worker gave no answer."""

    status: int
    kind: str
    message: str
    worker: Worker
    resend: bool
    """Whether another worker may get the request."""


class Passage:
    """One request's way through."""

    def __init__(
        self,
        workers: Workers,
        settings: RouterSettings,
        connections_to: Callable[[Worker], Connections],
        request: ClientRequest,
        send: Send,
    ) -> None:
        self._workers = workers
        self._settings = settings
        self._connections_to = connections_to
        self._request = request
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._leash: Leash | None = None
        self._taken: Worker | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._started = False
        self._uploaded = False
        self._clients_turn = False
        self._progress = 0.0

    @property
    def client_left(self) -> bool:
        """Whether the client went away before its answer was complete."""
        return self._leash is not None and self._leash.client_left

    async def run(self) -> None:
        """Carry the request to its end, whatever that is. Cancelled when the client leaves."""
        if self._request.whole:
            self._uploaded = True
            self._leash = Leash(self._request.until_left)
        try:
            await self._find_answer()
        finally:
            self._release()
            if self._leash is not None:
                self._leash.let_go()

    async def cut_short(self) -> None:
        """End a request that there is no more time for."""
        if self._started:
            self._request.break_off()
        else:
            await answer_unavailable(self._send, "stopping", "the router is stopping", self._settings)

    async def _find_answer(self) -> None:
        deadline = time.monotonic() + self._settings.queue_timeout_s
        tried: list[Worker] = []
        failure: Failure | None = None
        while True:
            self._taken = self._workers.take(but_not=tried)
            if self._taken is None and failure is not None and self._workers.num_ready():
                break  # each worker that is ready has been tried
            if self._taken is None:
                try:
                    self._taken = await self._workers.wait_to_take(deadline=deadline)
                except NoReadyWorker as error:
                    kind = "queue_full" if isinstance(error, QueueFull) else "no_ready_worker"
                    await answer_unavailable(self._send, kind, str(error), self._settings)
                    return
            worker = self._taken
            failure = await self._attempt(worker)
            tried.append(worker)
            self._release()
            if failure is None:
                return
            if not failure.resend:
                break
        url = str(failure.worker.url)
        await answer_error(self._send, failure.status, failure.kind, failure.message, worker=url)

    async def _attempt(self, worker: Worker) -> Failure | None:
        """One worker's try. None: the client has its answer, or a part of one that was broken off."""
        connections = self._connections_to(worker)
        fresh = not self._request.whole  # what is not kept can be sent only once
        while True:
            try:
                connection, used = await connections.get(fresh=fresh)
            except NotOpened as error:
                return self._not_opened(worker, error)
            keep = False
            try:
                await self._exchange(connection, worker)
                keep = self._uploaded
                return None
            except NothingAccepted as error:
                if not used:
                    return self._failed(worker, connection, error)
                fresh = True  # the connection was closed meanwhile; the worker never saw the request
                connections.distrust(connection)
            except UpstreamError as error:
                if used and not connection.begun:
                    connections.distrust(connection)
                failure = self._failed(worker, connection, error)
                if not self._started:
                    return failure
                self._request.break_off()
                return None
            finally:
                if keep:
                    connections.put(connection)
                else:
                    connection.close()

    async def _exchange(self, connection: Connection, worker: Worker) -> None:
        """Send the request, pass the answer on. Raises UpstreamError."""
        connection.begin(self._request.method)
        connection.write(self._head(worker) + (self._request.first if self._request.whole else b""))
        self._progress = self._loop.time()
        if not self._request.whole:
            self._leash = Leash(functools.partial(self._upload, connection))
        self._timer = self._loop.call_later(self._settings.first_byte_timeout_s, self._late, connection)
        try:
            await connection.head()
        finally:
            self._timer.cancel()
        self._workers.heard(worker)
        self._started = True
        headers = response_headers(connection.status, connection.headers)
        await self._send({"type": "http.response.start", "status": connection.status, "headers": headers})
        while True:
            piece = await connection.read()
            if connection.complete:
                break
            self._workers.heard(worker)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._workers.answered(worker, connection.status)
        self._release()  # a client that is slow to take the rest does not hold the worker
        if self._leash is not None:
            self._leash.let_go()
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    def _head(self, worker: Worker) -> bytes:
        request = self._request
        length = request.declared_length
        if request.whole and (request.first or request.method in ("POST", "PUT", "PATCH")):
            length = len(request.first)
        elif request.whole and length is None:
            length = -1
        host = worker.url.netloc.encode("ascii")
        return request_head(
            request.method, request.target, request.headers, host=host, content_length=length, close=False
        )

    async def _upload(self, connection: Connection) -> None:
        """Send the body as the client sends it; then wait. Returns when the client left."""
        chunked = self._request.declared_length is None
        piece, last = self._request.first, False
        try:
            while True:
                if piece:
                    connection.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                await connection.drain()
                self._progress = self._loop.time()
                if last:
                    break
                self._clients_turn = True
                piece, last = await self._request.next_bytes()
                self._clients_turn = False
            if chunked:
                connection.write(b"0\r\n\r\n")
            self._uploaded = True
            await self._request.until_left()
        except ClientLeft:
            return

    def _late(self, connection: Connection) -> None:
        """The time for the first byte of the answer is over, unless the body is still on its way."""
        limit_s = self._settings.first_byte_timeout_s
        left_s = self._progress + limit_s - self._loop.time()
        if left_s > 0.001:
            self._timer = self._loop.call_later(left_s, self._late, connection)
        elif self._clients_turn:
            connection.fail(ClientStalled(f"was not sent the rest of the body for {limit_s:g} s"))
        else:
            connection.fail(AnswerLate(f"did not begin its answer within {limit_s:g} s"))

    def _not_opened(self, worker: Worker, error: NotOpened) -> Failure:
        self._workers.failed(worker, str(error))
        if isinstance(error, Refused):
            self._workers.gone(worker, str(error))
        worker.probe_soon.set()
        status = 504 if isinstance(error, ConnectTimeout) else 502
        return Failure(status, "worker_unreachable", str(error), worker, resend=True)

    def _failed(self, worker: Worker, connection: Connection, error: UpstreamError) -> Failure:
        message = f"{worker.url} {error}"
        if isinstance(error, ClientStalled):
            return Failure(408, "client_stalled", message, worker, resend=False)
        self._workers.failed(worker, message)
        log.warning("request_failed", worker=worker.worker_id, url=str(worker.url), error=str(error))
        if isinstance(error, AnswerLate):
            return Failure(504, "worker_late", message, worker, resend=False)
        worker.probe_soon.set()
        unheard = self._request.whole and self._request.idempotent and not connection.begun
        unaccepted = self._request.whole and isinstance(error, NothingAccepted)
        return Failure(502, "worker_broken", message, worker, resend=unheard or unaccepted)

    def _release(self) -> None:
        if self._taken is not None:
            taken, self._taken = self._taken, None
            self._workers.give_back(taken)
