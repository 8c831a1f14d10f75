"""The one thread that writes the store. Everything that waits is committed together; only then is it acknowledged.

Records, what they add to rows in the making, and the rows that became ready are one transaction: after a kill at any
moment the rows are exactly those of the records that were acknowledged. When the disk has little room left, records
are held off and everything else goes on; when it has room again, so do they.
"""

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from furlong.jsonline import Secrets
from services.metrics import salvage
from services.metrics.committimes import CommitTimes
from services.metrics.counts import Counts
from services.metrics.intake import Intake, Record, RecordsIn, Taken, put_mark
from services.metrics.retention import Retention
from services.metrics.room import Room, cannot_be_written
from services.metrics.rows import Row, StoredBatch
from services.metrics.rowstore import RowStore
from services.metrics.runs import Runs
from services.metrics.store import open_store

log = structlog.get_logger()
Result = TypeVar("Result")

MAX_GROUP_JOBS = 64
MAX_GROUP_BYTES = 8 * 1024 * 1024
RECORD_COST_BYTES = 256
"""What a record counts for beside its own bytes: small ones take time and room too."""
TICK_S = 0.25
UNREADABLE_AFTER_S = 60.0
OPEN_AGAIN_S = 5.0
"""Between two attempts to make a damaged store anew: each may copy all of it."""


class StoreFailed(Exception):
    """The store could not be written; nothing of the batch was taken."""


class StoreFull(StoreFailed):
    """There is little room left on the disk: hold the records, and send them later."""


@dataclass(frozen=True)
class Committed:
    """What came into the store with one commit."""

    batches: Sequence[StoredBatch]
    rows: Sequence[Row]


class Sending:
    """Batches that one sender sends without waiting for each: when one is not stored, those behind it are not either.

    Else their numbers would say that it is there, and it would be passed over when it is sent again.
    """

    def __init__(self) -> None:
        self.failed = False


@dataclass(frozen=True)
class _Job:
    work: "Callable[[Writer], Any]"  # Any: what the job's future holds
    size_bytes: int
    sending: Sending | None
    """Of records; None: it is other work."""
    done: "Future[Any]"

    @property
    def is_records(self) -> bool:
        return self.sending is not None

    def fail(self, error: Exception) -> None:
        """It is not in the store."""
        if self.sending is not None:
            self.sending.failed = True
        self.done.set_exception(error)


class Writer(threading.Thread):
    """Takes jobs from any thread; a job's future is done when it is on disk, or has the error why it is not."""

    def __init__(
        self,
        path: Path,
        *,
        row_timeout_s: float,
        secrets: Secrets,
        on_death: Callable[[str], None],
        on_commit: Callable[[Committed], None] | None = None,
        on_notable: Callable[[str, Record], None] | None = None,
        min_free_bytes: int = 0,
        max_age_s: float = 0.0,
        max_bytes: int = 0,
    ) -> None:
        """max_age_s, max_bytes: what is kept. 0: all."""
        super().__init__(name="metrics-writer", daemon=True)
        self.counts = Counts()
        self.commit_times = CommitTimes()
        self.failing = ""
        """Why the store cannot be written. Empty: it can."""
        self.on_commit = on_commit
        """Called in this thread after each commit that brought something."""
        self.on_notable = on_notable
        """Called in this thread with run and record, after the commit, for the events of NOTABLE_EVENTS."""
        self._path, self._row_timeout_s, self._secrets, self._on_death = path, row_timeout_s, secrets, on_death
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._room = Room(path, min_free_bytes)
        self.retention = Retention(self.counts, max_age_s=max_age_s, max_bytes=max_bytes)
        self._closed_for = ""
        """What is wrong with the store while it waits to be made anew. Empty: it is open."""
        self._open_again_at = 0.0
        self._failing_since = 0.0
        self._open()

    @property
    def num_waiting(self) -> int:
        """Jobs that nobody has begun."""
        return self._jobs.qsize()

    @property
    def holding(self) -> str:
        """Why records are not taken. Empty: they are."""
        return self._room.short

    def submit(self, batch: RecordsIn, sending: Sending | None = None) -> "Future[Taken]":
        """Store a batch. The future raises StoreFull or StoreFailed.

        sending: of who submits several before the first is done; another one once it sends them again.
        """
        size_bytes = sum(map(len, batch.bodies)) + RECORD_COST_BYTES * len(batch.bodies)
        return self._put(lambda writer: writer.intake.take(batch), size_bytes, sending or Sending())

    def put_marks(self, marks: Mapping[str, bytes | None]) -> "Future[None]":
        """Keep small states by name. None: forget."""

        def put(connection: sqlite3.Connection) -> None:
            for name, body in marks.items():
                put_mark(connection, name, body)

        return self.execute(put)

    def execute(self, work: Callable[[sqlite3.Connection], Result]) -> "Future[Result]":
        """Have the store changed by work, in this thread and with the next commit; quick work only.

        What work raises, the future raises; nothing of it is then in the store, and nobody else's work suffers.
        """
        return self._put(lambda writer: writer._guarded(work), 64)

    def set_cursor(self, sink: str, row_id: int, position: int) -> "Future[None]":
        """Remember how far a sink is, and its own position there."""
        put = "INSERT OR REPLACE INTO cursors VALUES (?, ?, ?)"
        return self.execute(lambda connection: _no_result(connection.execute(put, (sink, row_id, position))))

    def emit_waiting(self) -> "Future[None]":
        """Hand on all rows that still wait for a part, incomplete as they are."""
        return self._put(lambda writer: writer.rows.emit_waiting(), 64)

    def barrier(self) -> "Future[None]":
        """Done when all that was submitted before is on disk."""
        return self._put(lambda writer: None, 0)

    def report_damage(self, reason: str) -> None:
        """The store was found damaged: have it set aside and made anew of what can be read."""

        def fail(writer: "Writer") -> None:
            raise sqlite3.DatabaseError(reason)

        self._put(fail, 64)

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
                jobs.clear()  # while more is waited for, nothing of these is held here
                self._retain()
            self._connection.close()
        except BaseException as error:
            self._on_death(f"the metrics writer ended: {error!r}")
            raise

    def _put(self, work: "Callable[[Writer], Any]", size_bytes: int, sending: Sending | None = None) -> "Future[Any]":
        job = _Job(work, size_bytes, sending, Future())
        job.done.set_running_or_notify_cancel()  # who waits may go away; the work is done all the same
        self._jobs.put(job)
        return job.done

    def _open(self, damage: str = "") -> None:
        """Raises OSError, sqlite3.Error."""
        opened = open_store(self._path, damage=damage)
        if opened.salvage is not None:
            _report(opened.salvage)
        self._connection = opened.connection
        self.runs = Runs(self._connection)
        self.rows = RowStore(self._connection, self.runs, self.counts.conflict, row_timeout_s=self._row_timeout_s)
        self.intake = Intake(self._connection, self.runs, self.rows, self.counts, self._secrets)
        try:
            self.rows.begin()
        except sqlite3.DatabaseError as error:  # a table that the look at a large file does not go through
            if salvage.is_damage(error) and not damage:
                self._connection.close()
                self._open(damage=str(error))  # else the next commit says it

    def _guarded(self, work: Callable[[sqlite3.Connection], Result]) -> "Result | _Failed":
        self._connection.execute("SAVEPOINT work")
        try:
            result = work(self._connection)
        except Exception as error:  # somebody else's work: the error is theirs, unless the store itself fails
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(
                error, (sqlite3.IntegrityError, sqlite3.ProgrammingError)
            ):
                raise
            self._connection.execute("ROLLBACK TO work")
            self._connection.execute("RELEASE work")
            return _Failed(error)
        self._connection.execute("RELEASE work")
        return result

    def _gather(self) -> tuple[list[_Job], bool]:
        jobs: list[_Job] = []
        size = 0
        wait_s = TICK_S / 10 if self.retention.is_busy or self.rows.has_due() else TICK_S
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
        jobs = _refuse_behind_failed(jobs)
        if self._room.is_short(sum(job.size_bytes for job in jobs if job.is_records)):
            jobs = self._hold(jobs)
        if not jobs and not self.rows.has_due():
            return
        begun = time.perf_counter()
        try:
            self._connection.execute("BEGIN IMMEDIATE")  # refused when the last one could not be rolled back
            self.rows.begin()
            results = [job.work(self) for job in jobs]
            rows = self.rows.emit_ready()
            self.intake.save()
            self.runs.save()
            self._connection.execute("COMMIT")
        except Exception as error:  # the disk is full, the file is damaged; or a bug, which must not end the thread
            if isinstance(error, sqlite3.Error) or len(jobs) < 2:
                self._failed(jobs, error)
            else:
                self._one_by_one(jobs)
            return
        self.commit_times.add(time.perf_counter() - begun)
        if self.failing:
            self.failing = ""
            log.info("metrics_store_works_again")
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, _Failed):
                job.done.set_exception(result.error)
            else:
                job.done.set_result(result)
        self._tell(rows)

    def _retain(self) -> None:
        """Let retention do a little. When the store fails, the next commit says so."""
        if self.failing:
            return
        try:
            self.retention.step(self._connection)
        except sqlite3.Error as error:
            self._failed([], error)
        else:
            if self.retention.take_removed_rows():
                self.rows.forget()  # it may hold what is gone

    def _one_by_one(self, jobs: list[_Job]) -> None:
        """One of them has what we did not think of: only that one is to fail, not all that came with it."""
        self._undo()
        for job in jobs:
            self._commit([job])

    def _undo(self) -> None:
        """Forget what may not be in the store, and roll back. While that fails nothing can begin, and it is tried
        again: what was forgotten first cannot be acknowledged.
        """
        self.intake.forget()
        self.runs.forget()
        self.rows.forget()
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            log.error("metrics_store_not_rolled_back", error=repr(error))

    def _tell(self, rows: list[Row]) -> None:
        batches, notable = self.intake.finish()
        try:
            if self.on_commit is not None and (batches or rows):
                self.on_commit(Committed(batches, rows))
            if self.on_notable is not None:
                for run, record in notable:
                    self.on_notable(run, record)
        except Exception as error:  # who listens must not stop the writing
            log.error("metrics_listener_failed", error=repr(error), exc_info=error)

    def _hold(self, jobs: list[_Job]) -> list[_Job]:
        """Refuse the records, so that what is small and must be written still has room."""
        others = []
        for job in jobs:
            if job.is_records:
                self.counts.num_held += 1
                job.fail(StoreFull(self._room.short))
            else:
                others.append(job)
        return others

    def _failed(self, jobs: list[_Job], error: Exception) -> None:
        if not self.failing:
            self._failing_since = time.monotonic()
            log.error("metrics_store_failing", error=repr(error), exc_info=error)
        if not self._closed_for:
            self.failing = repr(error)
            self._undo()
            if isinstance(error, sqlite3.DatabaseError) and (salvage.is_damage(error) or self._is_unreadable(error)):
                self._connection.close()
                self._closed_for, self._open_again_at = str(error), 0.0
        if self._closed_for and time.monotonic() >= self._open_again_at:
            self._open_again()
        for job in jobs:
            job.fail(StoreFailed(self.failing))
        time.sleep(TICK_S)  # producers wait, and send again

    def _open_again(self) -> None:
        """Make the damaged store anew. When that fails, say why: it is tried again, with the next commit."""
        try:
            self._open(damage=self._closed_for)
            self._closed_for = ""
        except (sqlite3.Error, OSError) as error:
            self.failing = repr(error)
            self._open_again_at = time.monotonic() + OPEN_AGAIN_S
            log.error("metrics_store_not_reopened", error=repr(error))

    def _is_unreadable(self, error: sqlite3.DatabaseError) -> bool:
        """Whether the file has failed for so long, on a disk that is well otherwise, that it is given up."""
        lasts = time.monotonic() - self._failing_since > UNREADABLE_AFTER_S
        return lasts and "disk I/O error" in str(error) and not cannot_be_written(self._path.parent)


@dataclass(frozen=True)
class _Failed:
    error: Exception


def _refuse_behind_failed(jobs: list[_Job]) -> list[_Job]:
    """Those that may be stored."""
    kept = []
    for job in jobs:
        if job.sending is not None and job.sending.failed:
            job.fail(StoreFailed("an earlier batch could not be stored: it comes first"))
        else:
            kept.append(job)
    return kept


def _no_result(_: object) -> None:
    return None


def _report(found: salvage.Salvage) -> None:
    log.error(
        "metrics_store_damaged",
        reason=found.reason,
        set_aside=found.set_aside.name,
        num_rescued=found.num_rescued,
        complete_tables=found.complete_tables,
        num_lost_commits=found.num_lost_commits,
        num_rebuilt_rows=found.num_rebuilt_rows,
    )
