"""One request to many workers: bounded in time, size and number at once; a worker that fails is a result, not an error.

Knows nothing of what is asked; `joins.py` and `exposition.py` make one of what was told.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from services.router.http.calls import CALLER, CallAnswer, call
from services.router.http.connections import NotOpened
from services.router.http.upstream import UpstreamError
from services.router.workers.workers import Worker

log = structlog.get_logger()

READ_TIMEOUT_S = 10.0
"""For what engines answer at once."""
MAX_READS = 64
"""Calls at once for all readers together: a client that asks often does not take the workers' attention."""
MAX_READERS = 32
"""Clients that may be waiting for such calls at once."""
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


class Busy(Exception):
    """As many clients as may ask all workers at once are doing so."""


class FanOut:
    """Asks workers. worker_ca: PEM file of whom to trust over https; empty: the system's authorities. identity: of
    this router."""

    def __init__(self, *, worker_ca: str = "", identity: bytes = b"") -> None:
        self._identity = identity
        self._worker_ca = worker_ca
        self._num_readers = 0
        self._reads = asyncio.Semaphore(MAX_READS)
        self._changes = asyncio.Semaphore(MAX_CHANGES)

    async def read(self, workers: Sequence[Worker], target: str, *, headers: Headers = ()) -> list[Told]:
        """GET from each what it answers at once. Raises Busy."""
        if self._num_readers >= MAX_READERS:
            raise Busy(f"{MAX_READERS} clients are asking all workers already")
        self._num_readers += 1
        try:
            return await self._all(self._reads, workers, "GET", target, READ_TIMEOUT_S, None, headers)
        finally:
            self._num_readers -= 1

    async def change(
        self,
        workers: Sequence[Worker],
        method: str,
        target: str,
        *,
        timeout_s: float,
        body: bytes | None = None,
        headers: Headers = (),
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
            try:
                async with asyncio.timeout(timeout_s), limit:
                    return await self._ask(worker, method, target, timeout_s, body, headers)
            except TimeoutError:
                log.warning("worker_call_late", url=str(worker.url), timeout_s=timeout_s)
                return Told(worker, None, f"not answered within {timeout_s:g} s")

        return await asyncio.gather(*(one(worker) for worker in workers))

    async def _ask(
        self, worker: Worker, method: str, target: str, timeout_s: float, body: bytes | None, headers: Headers
    ) -> Told:
        sent = [*headers, (CALLER, self._identity)]
        if worker.api_key:
            sent = [pair for pair in sent if pair[0] != b"authorization"]
            sent.append((b"authorization", b"Bearer " + worker.api_key.encode()))
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
        except (NotOpened, UpstreamError) as error:
            log.warning("worker_call_failed", error=str(error), **shown)
            return Told(worker, None, str(error))
        if answer.status >= 300:
            log.warning("worker_call_refused", status=answer.status, **shown)
        return Told(worker, answer, "")
