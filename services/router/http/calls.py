"""The router's own small calls to workers: probes, and what goes to many of them. Each has a connection of its own and
a limit in time and size."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.http.connections import open_connection
from services.router.http.headers import request_head
from services.router.http.upstream import Connection, UpstreamError
from services.router.workers.urls import WorkerUrl

MAX_ANSWER_BYTES = 256 * 1024
CALLER = b"x-furlong-router"
"""Header of such calls: which router makes them. One that comes back to its sender went in a circle."""
IN_A_CIRCLE = 508


@dataclass(frozen=True)
class CallAnswer:
    """What a worker answered."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    """Names in lower case; without those that are for one connection only."""
    body: bytes


class _Call:
    """Gathers one answer."""

    def __init__(self, target: str, max_answer_bytes: int) -> None:
        self.answer: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        self._target = target
        self._max_answer_bytes = max_answer_bytes
        self._body = bytearray()

    def on_answer(self, connection: Connection, body: bytes) -> None:
        self._body += body
        if len(self._body) > self._max_answer_bytes:
            connection.close()
            limit = f"more than {self._max_answer_bytes} bytes"
            self.on_error(connection, UpstreamError(f"answered {self._target[:200]} with {limit}"))
        elif connection.complete and not self.answer.done():
            pairs = (line.rstrip(b"\r\n").partition(b": ") for line in connection.lines)
            headers = [(name.lower(), value) for name, _, value in pairs]
            self.answer.set_result(CallAnswer(connection.status, headers, bytes(self._body)))

    def on_error(self, connection: Connection, error: UpstreamError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def on_writable(self, connection: Connection) -> None:
        """All was written at once."""


async def call(
    url: WorkerUrl,
    method: str,
    target: str,
    *,
    timeout_s: float,
    body: bytes | None = None,
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),),
    max_answer_bytes: int = MAX_ANSWER_BYTES,
    worker_ca: str = "",
) -> CallAnswer:
    """Make a call and read its answer. Raises NotOpened, UpstreamError, TimeoutError.

    headers: more than host and length. That the body is JSON is said only when there is one.
    worker_ca: PEM file of whom to trust over https; empty: the system's authorities.
    """
    async with asyncio.timeout(timeout_s):
        connection = await open_connection(url, timeout_s=timeout_s, worker_ca=worker_ca)
        try:
            asked = _Call(f"{method} {target}", max_answer_bytes)
            connection.begin(asked, method)
            lines = [
                b"%b: %b\r\n" % (name, value) for name, value in headers if body is not None or name != b"content-type"
            ]
            length = len(body) if body is not None else -1
            host = url.netloc.encode()
            connection.write(request_head(method, target.encode(), lines, host=host, content_length=length, close=True))
            if body:
                connection.write(body)
            return await asked.answer
        finally:
            connection.close()
