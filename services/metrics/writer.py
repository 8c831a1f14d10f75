"""The one thread that writes the store. Everything that waits is committed together; only then is it acknowledged.

Records, what they add to rows in the making, and the rows that became ready are one transaction: after a kill at any
moment the rows are exactly those of the records that were acknowledged.
"""

import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import structlog

from furlong.jsonline import Secrets
from services.metrics.intake import Intake, RecordsIn, Taken
from services.metrics.rowstore import RowStore
from services.metrics.store import open_store

log = structlog.get_logger()

MAX_GROUP_JOBS = 64
MAX_GROUP_BYTES = 16 * 1024 * 1024
TICK_S = 0.25


class StoreFailed(Exception):
    """The store could not be written; nothing of the batch was taken."""


@dataclass(frozen=True)
class _Job:
    work: "Callable[[Writer], Taken | None]"
    size_bytes: int
    done: "Future[Taken | None]"


@dataclass
class Counts:
    """Since the start."""

    num_refused: int = 0
    num_missing: int = 0
    """Numbers that a producer skipped: records it lost."""
    num_dropped: int = 0
    """Records that a producer dropped for want of room, and said so."""
    num_bad_metrics: int = 0
    num_conflicts: int = 0


class Writer(threading.Thread):
    """Takes jobs from any thread; a job's future is done when it is on disk."""

    def __init__(
        self,
        path: Path,
        *,
        row_timeout_s: float,
        secrets: Secrets,
        on_rows: Callable[[], None],
        on_death: Callable[[str], None],
    ) -> None:
        super().__init__(name="metrics-writer", daemon=True)
        self.counts = Counts()
        self.failing = ""
        self._path, self._row_timeout_s, self._on_rows = path, row_timeout_s, on_rows
        self._secrets, self._on_death = secrets, on_death
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open()

    def submit(self, batch: RecordsIn) -> "Future[Taken | None]":
        """Store a batch."""
        return self._put(lambda writer: writer.intake.take(batch), sum(map(len, batch.bodies)))

    def set_cursor(self, sink: str, row_id: int, position: int) -> "Future[Taken | None]":
        """Remember how far a sink is."""
        return self._put(lambda writer: writer.rows.set_cursor(sink, row_id, position), 64)

    def emit_waiting(self) -> "Future[Taken | None]":
        """Hand on all rows that still wait for a part, incomplete as they are."""
        return self._put(lambda writer: writer.rows.emit_waiting(), 64)

    def barrier(self) -> "Future[Taken | None]":
        """Done when all that was submitted before is on disk."""
        return self._put(lambda writer: None, 0)

    def close(self, timeout_s: float) -> None:
        """Commit what waits and close the store."""
        self._jobs.put(None)
        self.join(timeout_s)

    def run(self) -> None:
        closing = False
        try:
            while not closing:
                jobs, closing = self._gather()
                self._commit(jobs)
            self._connection.close()
        except BaseException as error:
            self._on_death(f"the metrics writer ended: {error!r}")
            raise

    def _put(self, work: "Callable[[Writer], Taken | None]", size_bytes: int) -> "Future[Taken | None]":
        job = _Job(work, size_bytes, Future())
        job.done.set_running_or_notify_cancel()  # who waits may go away; the work is done all the same
        self._jobs.put(job)
        return job.done

    def _open(self) -> None:
        opened = open_store(self._path)
        if opened.salvage is not None:
            found = opened.salvage
            log.error(
                "metrics_store_damaged",
                reason=found.reason,
                set_aside=found.set_aside.name,
                num_rescued=found.num_rescued,
                complete_tables=found.complete_tables,
            )
        self._connection = opened.connection
        self.rows = RowStore(self._connection, self.counts_problem, row_timeout_s=self._row_timeout_s)
        self.intake = Intake(self._connection, self.rows, self.counts, self._secrets)

    def counts_problem(self, key: str, problem: str) -> None:
        """A part that did not fit; said in the log, and counted."""
        self.counts.num_conflicts += 1
        if self.counts.num_conflicts <= 100:
            log.warning("metrics_conflict", row=key, problem=problem)

    def _gather(self) -> tuple[list[_Job], bool]:
        jobs: list[_Job] = []
        size = 0
        wait_s = TICK_S
        while len(jobs) < MAX_GROUP_JOBS and size < MAX_GROUP_BYTES:
            try:
                job = self._jobs.get(timeout=wait_s) if wait_s else self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return jobs, True
            jobs.append(job)
            size += job.size_bytes
            wait_s = 0.0
        return jobs, False

    def _commit(self, jobs: list[_Job]) -> None:
        if not jobs and not self.rows.has_due(time.time()):
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            results = [job.work(self) for job in jobs]
            num_rows = self.rows.emit_ready(time.time())
            self._connection.execute("COMMIT")
        except Exception as error:  # the disk is full, the file is damaged; or a bug, which must not end the thread
            self._failed(jobs, error)
            return
        self.failing = ""
        for job, result in zip(jobs, results, strict=True):
            job.done.set_result(result)
        if num_rows:
            self._on_rows()

    def _failed(self, jobs: list[_Job], error: Exception) -> None:
        if not self.failing:
            log.error("metrics_store_failing", error=repr(error), exc_info=error)
        self.failing = repr(error)
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self.rows.forget()
            self.intake.forget()
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                self._connection.close()
                self._open()
        except (sqlite3.Error, OSError) as second:
            log.error("metrics_store_not_reopened", error=repr(second))
        for job in jobs:
            job.done.set_exception(StoreFailed(repr(error)))
        time.sleep(TICK_S)  # producers wait, and send again
