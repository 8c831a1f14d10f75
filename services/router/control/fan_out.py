"""One request to many workers: bounded in time, size and number at once; a worker that fails is a result, not an error.

Knows nothing of what is asked; `answers.py` joins what was told.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from services.router.http.calls import CallAnswer, call
from services.router.http.connections import NotOpened
from services.router.http.upstream import UpstreamError
from services.router.workers.workers import Worker

log = structlog.get_logger()

READ_TIMEOUT_S = 10.0
"""For what engines answer at once."""
MAX_READS = 64
"""Calls at once for all readers together: a client that asks often does not take the workers' attention."""
MAX_CHANGES = 1024
"""Calls at once that change something, some of which only end when every worker has its own."""
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_ERROR_CHARS = 300

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Told:
    """What one worker said."""

    worker: Worker
    answer: CallAnswer | None
    error: str
    """Why there is no answer."""

    @property
    def url(self) -> str:
        return str(self.worker.url)

    @property
    def good(self) -> bool:
        """Answered with success."""
        return self.answer is not None and 200 <= self.answer.status < 300

    @property
    def body(self) -> bytes:
        return self.answer.body if self.answer is not None else b""

    @property
    def status(self) -> int:
        """0: no answer."""
        return self.answer.status if self.answer is not None else 0

    @property
    def problem(self) -> str:
        """What went wrong, in words; empty: nothing."""
        if self.answer is None:
            return self.error
        if self.good:
            return ""
        text = self.answer.body[:MAX_ERROR_CHARS].decode("utf-8", "replace").strip()
        return f"answered {self.answer.status}{f': {text}' if text else ''}"


class FanOut:
    """Asks workers. worker_ca: PEM file of whom to trust over https; empty: the system's authorities."""

    def __init__(self, *, worker_ca: str = "") -> None:
        self._worker_ca = worker_ca
        self._reads = asyncio.Semaphore(MAX_READS)
        self._changes = asyncio.Semaphore(MAX_CHANGES)

    async def read(self, workers: Sequence[Worker], target: str) -> list[Told]:
        """GET from each what it answers at once."""
        return await self._all(self._reads, workers, "GET", target, READ_TIMEOUT_S, None, ())

    async def change(
        self,
        workers: Sequence[Worker],
        method: str,
        target: str,
        *,
        timeout_s: float,
        body: bytes | None = None,
        headers: Headers = ((b"content-type", b"application/json"),),
    ) -> list[Told]:
        """Send the same to each, to all at once."""
        return await self._all(self._changes, workers, method, target, timeout_s, body, headers)

    async def _all(
        self,
        limit: asyncio.Semaphore,
        workers: Sequence[Worker],
        method: str,
        target: str,
        timeout_s: float,
        body: bytes | None,
        headers: Headers,
    ) -> list[Told]:
        async def one(worker: Worker) -> Told:
            async with limit:
                return await self._ask(worker, method, target, timeout_s, body, headers)

        return await asyncio.gather(*(one(worker) for worker in workers))

    async def _ask(
        self, worker: Worker, method: str, target: str, timeout_s: float, body: bytes | None, headers: Headers
    ) -> Told:
        sent = [*headers, (b"authorization", b"Bearer " + worker.api_key.encode())] if worker.api_key else headers
        shown = {"worker": worker.worker_id, "url": str(worker.url), "path": target.partition("?")[0][:200]}
        try:
            answer = await call(
                worker.url,
                method,
                target,
                timeout_s=timeout_s,
                body=body,
                headers=sent,
                max_answer_bytes=MAX_ANSWER_BYTES,
                worker_ca=self._worker_ca,
            )
        except (NotOpened, UpstreamError, TimeoutError) as error:
            message = str(error) or f"not answered within {timeout_s:g} s"
            log.warning("worker_call_failed", error=message, **shown)
            return Told(worker, None, message)
        if answer.status >= 300:
            log.warning("worker_call_refused", status=answer.status, **shown)
        return Told(worker, answer, "")
