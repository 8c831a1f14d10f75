"""Reads the store beside its writer: rows for the sinks, batches for who follows the records, curves for who asks.

Any thread. Every connection only reads, and no read lasts longer than its answer: the write-ahead log does not grow
for it.
"""

import math
import os
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.metrics.store import open_reader

MAX_IDLE_CONNECTIONS = 4

# a newer attempt that reached back to this step or before it has taken the row's place
NOT_SUPERSEDED = """NOT EXISTS (SELECT 1 FROM attempts n WHERE n.run = s.run AND n.axis = s.axis
    AND n.attempt > s.attempt AND n.first_step <= s.step)"""


@dataclass(frozen=True)
class Row:
    """One row as it was handed on."""

    row_id: int
    run: str
    body: bytes
    """The JSON line, without its newline."""
    prior: bytes | None
    """What it amends."""
    is_current: bool
    """False: a newer attempt has come to this step, or to one before it."""
    emitted_us: int
    """When it was handed on, in microseconds since the epoch."""


@dataclass(frozen=True)
class StoredBatch:
    """Records of one run that one producer sent together."""

    batch_id: int
    run: str
    producer: str
    first_sequence: int
    received_us: int
    bodies: tuple[bytes, ...]
    """Each one JSON object. The id of the n-th is (batch_id << 16) + n."""
    top_level: int
    """The highest level among them, from 10 (debug) to 50 (critical)."""


@dataclass(frozen=True)
class KnownRun:
    """A run that the store has something of."""

    name: str
    first_us: int
    last_us: int


@dataclass(frozen=True)
class Series:
    """A curve that the store has points of."""

    axis: str
    key: str


class RowReader:
    """The store, as it is after the last commit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[tuple[int, sqlite3.Connection]] = []
        self._closed = False

    def after(self, row_id: int, limit: int, run: str | None = None) -> list[Row]:
        """The next rows."""
        of_run, values = ("", ()) if run is None else ("r.run_id = (SELECT id FROM runs WHERE name = ?) AND", (run,))
        found = self.query(
            f"SELECT r.id, s.run, r.body, p.body, {NOT_SUPERSEDED}, r.emitted_us FROM rows r"
            " LEFT JOIN rows p ON p.id = r.prior_id JOIN steps s ON s.id = r.step_id"
            f" WHERE {of_run} r.id > ? ORDER BY r.id LIMIT ?",
            (*values, row_id, limit),
        )
        return [Row(row_id, run, body, prior, bool(now), at) for row_id, run, body, prior, now, at in found]

    def newest(self, axis: str, last: int, run: str | None = None, attempt: int | None = None) -> list[bytes]:
        """The last rows of an axis, oldest first, each as it is now; of the newest attempt, or of the one asked for."""
        conditions, values = ["s.axis = ?"], [axis]
        if run is not None:
            conditions.append("s.run = ?")
            values.append(run)
        conditions.append(NOT_SUPERSEDED if attempt is None else "s.attempt = ?")
        found = self.query(
            "SELECT r.body FROM steps s JOIN rows r ON r.id = s.last_row_id"
            f" WHERE {' AND '.join(conditions)} ORDER BY s.step DESC LIMIT ?",
            (*values, *(() if attempt is None else (attempt,)), last),
        )
        return [body for (body,) in reversed(found)]

    def batches_after(self, batch_id: int, limit: int, run: str | None = None, min_level: int = 0) -> list[StoredBatch]:
        """The next batches, of one run or of all; without those whose highest level is below min_level."""
        of_run, values = ("", ()) if run is None else ("b.run_id = (SELECT id FROM runs WHERE name = ?) AND", (run,))
        found = self.query(
            "SELECT b.id, r.name, p.producer, b.first_sequence, b.received_us, b.body, b.top_level FROM batches b"
            " JOIN runs r ON r.id = b.run_id LEFT JOIN producers p ON p.id = b.producer_id"
            f" WHERE {of_run} b.id > ? AND b.top_level >= ? ORDER BY b.id LIMIT ?",
            (*values, batch_id, min_level, limit),
        )
        return [
            StoredBatch(batch_id, run, producer or "", first, at, tuple(body.split(b"\n")), level)
            for batch_id, run, producer, first, at, body, level in found
        ]

    def runs(self) -> list[KnownRun]:
        """All runs, the one that spoke last first."""
        return [KnownRun(*run) for run in self.query("SELECT name, first_us, last_us FROM runs ORDER BY last_us DESC")]

    def series(self, run: str) -> list[Series]:
        """The curves of a run."""
        find = "SELECT axis, key FROM series WHERE run_id = (SELECT id FROM runs WHERE name = ?) ORDER BY axis, key"
        return [Series(*found) for found in self.query(find, (run,))]

    def points(
        self, run: str, key: str, last: int | None = None, attempt: int | None = None, axis: str | None = None
    ) -> tuple[list[int], list[int], list[float]]:
        """A curve as steps, attempts and values, in the order of the steps: that of the newest attempt at each step,
        or that of the attempt asked for. A key that stands on several axes is that of the first, unless one is named.
        """
        found = self.query(
            "SELECT e.id, e.axis FROM series e JOIN runs r ON r.id = e.run_id WHERE r.name = ? AND e.key = ?"
            " AND e.axis = coalesce(?, e.axis) ORDER BY e.id LIMIT 1",
            (run, key, axis),
        )
        if not found:
            return [], [], []
        series_id, on_axis = found[0]
        begun = self.query("SELECT attempt, first_step FROM attempts WHERE run = ? AND axis = ?", (run, on_axis))
        select = "SELECT step, attempt, value FROM points WHERE series_id = ?"
        if len(begun) == 1 and attempt is None and last is not None:
            points = self.query(f"{select} ORDER BY step DESC LIMIT ?", (series_id, last))[::-1]
        else:
            points = _current(self.query(f"{select} ORDER BY step, attempt", (series_id,)), begun, attempt)
        steps, attempts, values = zip(*points[-last if last else 0 :], strict=True) if points else ((), (), ())
        return list(steps), list(attempts), [math.nan if value is None else value for value in values]

    def cursor(self, sink: str) -> tuple[int, int]:
        """How far a sink is, and its own position there."""
        found = self.query("SELECT row_id, position FROM cursors WHERE sink = ?", (sink,))
        return (int(found[0][0]), int(found[0][1])) if found else (0, 0)

    def mark(self, name: str) -> bytes | None:
        """A small state that was put by name."""
        found = self.query("SELECT body FROM marks WHERE name = ?", (name,))
        return bytes(found[0][0]) if found else None

    def num_records(self) -> int:
        """Records on disk."""
        totals = dict(self.query("SELECT name, value FROM totals"))
        return int(totals.get("records_stored", 0)) - int(totals.get("records_removed", 0))

    def last_row_id(self) -> int:
        return self._last("rows")

    def last_batch_id(self) -> int:
        return self._last("batches")

    def query(self, query: str, values: Sequence[object] = ()) -> list[tuple]:  # type: ignore[type-arg]
        """The whole answer to a SELECT; keep it small. Raises sqlite3.Error."""
        inode, connection = self._take()
        try:
            answer = connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError:  # the file was set aside and made anew meanwhile
            connection.close()
            inode, connection = self._open()
            answer = connection.execute(query, values).fetchall()
        self._give_back(inode, connection)
        return answer

    def close(self) -> None:
        """Let go of the store."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _last(self, table: str) -> int:
        return int(self.query(f"SELECT coalesce(max(id), 0) FROM {table}")[0][0])

    def _take(self) -> tuple[int, sqlite3.Connection]:
        inode = os.stat(self._path).st_ino if self._path.exists() else 0
        with self._lock:
            if self._closed:
                raise sqlite3.ProgrammingError("the reader is closed")
            while self._idle:
                known, connection = self._idle.pop()
                if known == inode:
                    return known, connection
                connection.close()  # of a file that was set aside
        return self._open()

    def _open(self) -> tuple[int, sqlite3.Connection]:
        connection = open_reader(self._path)
        return os.stat(self._path).st_ino, connection

    def _give_back(self, inode: int, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < MAX_IDLE_CONNECTIONS:
                self._idle.append((inode, connection))
                return
        connection.close()


def _current(
    points: Sequence[tuple[int, int, float | None]], begun: Sequence[tuple[int, int]], attempt: int | None
) -> list[tuple[int, int, float | None]]:
    """Those of one attempt; None: those that no newer attempt has come to."""
    if attempt is not None:
        return [point for point in points if point[1] == attempt]
    ends: dict[int, float] = {}
    end = math.inf
    for number, first_step in sorted(begun, reverse=True):
        ends[number] = end
        end = min(end, first_step)
    return [point for point in points if point[0] < ends.get(point[1], math.inf)]
