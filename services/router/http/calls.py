"""The router's own small calls to workers: probes and aborts. Each has a connection of its own and a limit."""

import asyncio
from dataclasses import dataclass

from services.router.http.connections import open_connection
from services.router.http.headers import request_head
from services.router.http.upstream import UpstreamError
from services.router.workers.urls import WorkerUrl

MAX_ANSWER_BYTES = 256 * 1024


@dataclass(frozen=True)
class CallAnswer:
    """What a worker answered."""

    status: int
    size_bytes: int


async def call(url: WorkerUrl, method: str, target: str, *, timeout_s: float, body: bytes | None = None) -> CallAnswer:
    """Make a call and read its answer. Raises NotOpened, UpstreamError, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        connection = await open_connection(url, timeout_s=timeout_s)
        try:
            connection.begin(method)
            headers = [(b"content-type", b"application/json")] if body is not None else []
            length = len(body) if body is not None else -1
            head = request_head(
                method, target.encode(), headers, host=url.netloc.encode(), content_length=length, close=True
            )
            connection.write(head + (body or b""))
            await connection.head()
            size_bytes = 0
            while piece := await connection.read():
                size_bytes += len(piece)
                if size_bytes > MAX_ANSWER_BYTES:
                    raise UpstreamError(f"answered {method} {target} with more than {MAX_ANSWER_BYTES} bytes")
            return CallAnswer(connection.status, size_bytes)
        finally:
            connection.close()
