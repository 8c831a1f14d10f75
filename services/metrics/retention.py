"""Keeps the store within its age and its size: the oldest records go first, then the oldest rows and their points.

Runs in the writer's thread between two commits, in steps that are short, so that taking in never waits for it. What a
sink still needs stays, unless the size cannot be kept otherwise; then it is said which sink lost how much. Room that is
no longer needed is given back to the disk.
"""

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson
import structlog

from services.metrics.counts import Counts
from services.metrics.schema import pragma
from services.metrics.soundness import is_row

log = structlog.get_logger()

LOOK_S = 2.0
"""How often it is looked whether something must go."""
STEP_S = 0.02
"""About how long the writer is kept at a time."""
SHARE = 4
"""Of the time, at most one part in so many, and one."""
STEP_BYTES = 1024 * 1024
STEP_BATCHES = 64
STEP_ROWS = 16
STEP_PAGES = 128
SLACK = 16
"""Free pages of one part in so many of the size are kept for what comes."""
MIN_SLACK_BYTES = 1024 * 1024
KEPT_BATCHES = 1
"""The newest stay: the counter of ids and the newest records are of use."""
_REMOVE_POINT = (
    "DELETE FROM points WHERE series_id = (SELECT id FROM series WHERE run_id = ? AND axis = ? AND key = ?)"
    " AND step = ? AND attempt = ?"
)
_REMOVE_POINTS = (  # slow where a run has had many series
    "DELETE FROM points WHERE series_id IN (SELECT id FROM series WHERE run_id = ? AND axis = ?)"
    " AND step = ? AND attempt = ?"
)


@dataclass(frozen=True)
class Needs:
    """Up to where each sink has what it follows, by the name of its cursor."""

    rows: Mapping[str, int] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=dict)


class Retention:
    """Removes what is too old or too much. `step` only in the writer's thread; `needs` may be set from any."""

    def __init__(self, counts: Counts, *, max_age_s: float, max_bytes: int) -> None:
        self.needs: Needs | None = None
        """Nothing is removed until it is known."""
        self.lost: dict[str, int] = {}
        """Of each sink, the rows or batches that went before it had them. Since the start."""
        self._counts, self._max_age_us, self._max_bytes = counts, int(max_age_s * 1e6), max_bytes
        self.is_busy = False
        """Whether there is more to do as soon as its turn comes."""
        self._next_at = 0.0
        self._removed_rows = False

    def take_removed_rows(self) -> bool:
        """Whether rows were removed since it was asked last."""
        removed, self._removed_rows = self._removed_rows, False
        return removed

    def step(self, connection: sqlite3.Connection) -> bool:
        """A little of what is to be done; whether something was. Raises sqlite3.Error; then nothing was."""
        began = time.monotonic()
        if self.needs is None or began < self._next_at or not (self._max_age_us or self._max_bytes):
            return False
        worked = False
        while time.monotonic() - began < STEP_S:
            if not (self._remove(connection) or self._give_back(connection)):
                self._settle(connection, worked=worked)
                return worked
            worked = True
        self._next_at = time.monotonic() + SHARE * (time.monotonic() - began)
        self.is_busy = True
        return True

    def _settle(self, connection: sqlite3.Connection, *, worked: bool) -> None:
        """There is no more to do for a while."""
        if worked or self.is_busy:  # the file gets shorter only now
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self.is_busy = False
        self._next_at = time.monotonic() + LOOK_S

    def _remove(self, connection: sqlite3.Connection) -> bool:
        too_large = bool(self._max_bytes) and _used_bytes(connection) > self._max_bytes
        before_us = time.time_ns() // 1000 - self._max_age_us if self._max_age_us else 0
        if not too_large and not before_us:
            return False
        safe_batch, safe_row = self._safe(connection, "batches"), self._safe(connection, "rows")
        if self._remove_batches(connection, safe_batch, None if too_large else before_us):
            return True
        if self._remove_rows(connection, safe_row, None if too_large else before_us):
            return True
        if not too_large:
            return False
        return self._remove_batches(connection, None, None) or self._remove_rows(connection, None, None)

    def _safe(self, connection: sqlite3.Connection, what: str) -> int:
        """The last one that every sink has."""
        followed = getattr(self.needs, what)
        durable = dict(connection.execute("SELECT sink, row_id FROM cursors"))
        return min((max(place, durable.get(name, 0)) for name, place in followed.items()), default=2**62)

    def _remove_batches(self, connection: sqlite3.Connection, safe_id: int | None, before_us: int | None) -> bool:
        """Some of the oldest. safe_id None: whoever needs them. before_us None: however young."""
        newest = connection.execute("SELECT coalesce(max(id), 0) FROM batches").fetchone()[0]
        found = connection.execute(
            "SELECT id, num_records, received_us, length(body) FROM batches WHERE id <= ? ORDER BY id LIMIT ?",
            (min(newest - KEPT_BATCHES, 2**62 if safe_id is None else safe_id), STEP_BATCHES),
        ).fetchall()
        chosen, size = [], 0
        for batch in found:
            if (before_us is not None and batch[2] >= before_us) or (chosen and size + batch[3] > STEP_BYTES):
                break
            chosen.append(batch)
            size += batch[3]
        if not chosen:
            return False
        last, num_records = chosen[-1][0], sum(batch[1] for batch in chosen)
        with _transaction(connection):
            connection.execute("DELETE FROM batches WHERE id <= ?", (last,))
            connection.execute("UPDATE totals SET value = value + ? WHERE name = 'records_removed'", (num_records,))
        self._counts.num_removed += num_records
        if safe_id is None:
            self._say_lost(connection, "batches", [batch[0] for batch in chosen])
        return True

    def _remove_rows(self, connection: sqlite3.Connection, safe_id: int | None, before_us: int | None) -> bool:
        found = connection.execute(
            "SELECT r.id, r.run_id, r.emitted_us, r.body, s.id, s.last_row_id, s.axis, s.step, s.attempt FROM rows r"
            " LEFT JOIN steps s ON s.id = r.step_id WHERE r.id <= ? ORDER BY r.id LIMIT ?",
            (2**62 if safe_id is None else safe_id, STEP_ROWS),
        ).fetchall()
        chosen = [row for row in found if before_us is None or row[2] < before_us]
        if not chosen:
            return False
        with _transaction(connection):
            for row_id, run_id, _, body, step_id, last_row_id, *place in chosen:
                connection.execute("DELETE FROM rows WHERE id = ?", (row_id,))
                if step_id is not None and last_row_id == row_id:
                    connection.execute("DELETE FROM contributions WHERE step_id = ?", (step_id,))
                    connection.execute("DELETE FROM steps WHERE id = ?", (step_id,))
                    _remove_points(connection, run_id, place, body)
        self._removed_rows = True
        if safe_id is None:
            self._say_lost(connection, "rows", [row[0] for row in chosen])
        return True

    def _say_lost(self, connection: sqlite3.Connection, what: str, ids: Sequence[int]) -> None:
        durable = dict(connection.execute("SELECT sink, row_id FROM cursors"))
        for name, place in getattr(self.needs, what).items():
            num_lost = sum(item > max(place, durable.get(name, 0)) for item in ids)
            if num_lost:
                if not self.lost.get(name):
                    log.warning("sink_lost_to_retention", sink=name, what=what, max_bytes=self._max_bytes)
                self.lost[name] = self.lost.get(name, 0) + num_lost

    def _give_back(self, connection: sqlite3.Connection) -> bool:
        """Whether pages were given back to the disk."""
        free = pragma(connection, "freelist_count")
        size = pragma(connection, "page_size")
        kept = max(MIN_SLACK_BYTES, self._max_bytes // SLACK) // size
        if free <= kept or pragma(connection, "auto_vacuum") != 2:
            return False
        connection.execute(f"PRAGMA incremental_vacuum({min(STEP_PAGES, free - kept)})").fetchall()
        return True


class _transaction:
    """One short transaction; nothing of it when it fails."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def _remove_points(connection: sqlite3.Connection, run_id: int, place: Sequence[object], body: object) -> None:
    """Those of a row. place: axis, step and attempt."""
    if not is_row(body):  # its text has gone bad: by what its step says
        connection.execute(_REMOVE_POINTS, (run_id, *place))
        return
    axis, step, attempt = place
    keys = orjson.loads(body)["values"]  # type: ignore[arg-type]  # it is bytes
    connection.executemany(_REMOVE_POINT, [(run_id, axis, key, step, attempt) for key in keys])


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages = pragma(connection, "page_count") - pragma(connection, "freelist_count")
    return pages * pragma(connection, "page_size")
