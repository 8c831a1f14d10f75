"""Reads a metrics store (SQLite), of a service that runs or of one that is gone. Never writes.

The schema is the metrics service's. Each question is one or a few short reads: none holds back the service's writer.
Not for several threads at once.
"""

import contextlib
import difflib
import sqlite3
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from furlong.asking.filters import LogFilter
from furlong.asking.thin import thinned

SCHEMA_VERSION = 2
RECORD_BITS = 16
"""A record's id is its batch's, shifted by so many bits, and its place in the batch."""
CHUNK_BATCHES = 8
MAX_SCANNED_ROWS = 20_000
"""For rows that hold something."""
MAX_SCANNED_BYTES = 256 * 1024 * 1024
"""Of log lines, for one question."""

# a newer attempt that reached back to this step or before it has taken the row's place
_CURRENT = """NOT EXISTS (SELECT 1 FROM attempts n WHERE n.run = s.run AND n.axis = s.axis AND n.attempt > s.attempt
    AND n.first_step <= s.step)"""


class NoStore(Exception):
    """There is no store, or it cannot be read by this version."""


@contextlib.contextmanager
def told_damage(path: Path) -> Generator[None]:
    """Whatever a damaged store's reading raises, as NoStore with what to do."""
    try:
        yield
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:  # a page, or the JSON that one holds
        remedy = "Start the metrics service on it once: it sets a damaged store aside and keeps what can be read."
        raise NoStore(f"{path} cannot be read: {error}. {remedy}") from error


class UnknownName(Exception):
    """A run or key that is not there; `close` holds the names that look like it."""

    def __init__(self, what: str, name: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no {what} {name!r}")
        self.what, self.close = what, closest(name, known)


class TookTooLong(Exception):
    """The question's time was up."""


@dataclass(frozen=True)
class LogLine:
    """A record that is no metrics."""

    record_id: int
    received_us: int
    body: bytes
    """The JSON object as it was taken in."""


@dataclass(frozen=True)
class LogPage:
    """An answer to a question for log lines, oldest first."""

    lines: list[LogLine]
    complete: bool
    """False: the scan ended at its limit; older lines than `scanned_from` were not looked at."""
    scanned_from: int


@dataclass(frozen=True)
class Curve:
    """One key over steps, of the newest attempt at each step or of one attempt."""

    run: str
    axis: str
    key: str
    steps: list[int]
    attempts: list[int]
    values: list[float | None]
    """None stands for NaN."""


@dataclass(frozen=True)
class Ids:
    """How far the store is: the newest record, row and alert."""

    record_id: int
    row_id: int
    alert_id: int


class StoreReader:
    """One read-only connection. Raises NoStore."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = _open(path)
        self._deadline: float | None = None

    def close(self) -> None:
        self._connection.close()

    def limit(self, limit_s: float | None) -> None:
        """What is asked from now on raises TookTooLong once so many seconds are over. None: no limit."""
        self._deadline = None if limit_s is None else time.monotonic() + limit_s

    def ids(self) -> Ids:
        """The newest of each."""
        known = dict(self._all("SELECT name, seq FROM sqlite_sequence"))
        return Ids(((known.get("batches", 0) + 1) << RECORD_BITS) - 1, known.get("rows", 0), known.get("alerts", 0))

    def runs(self) -> list[dict[str, object]]:
        """Every run, the one that was last heard of first, with its axes and how far each is."""
        found = self._all("SELECT id, name, first_us, last_us FROM runs ORDER BY last_us DESC")
        return [
            {"run": name, "first_us": first_us, "last_us": last_us, "axes": self._axes(run_id, name)}
            for run_id, name, first_us, last_us in found
        ]

    def rows(
        self,
        *,
        run: str | None = None,
        axis: str | None = None,
        attempt: int | None = None,
        last: int = 100,
        after: int | None = None,
    ) -> list[tuple[int, int, bytes]]:
        """(id, microseconds when it was handed on, JSON) of rows, oldest first.

        after: what was handed on after this row, the oldest `last` of it, amendments too. Otherwise the newest rows as
        they are now, by step, of the newest attempt at each step or of the attempt that is given.
        """
        asked: list[tuple[str, object]] = []
        if run is not None:
            self._run_id(run)
            asked.append(("s.run = ?", run))
        if axis is not None:
            asked.append(("s.axis = ?", axis))
        if attempt is not None:
            asked.append(("s.attempt = ?", attempt))
        conditions = [condition for condition, _ in asked]
        values: list[object] = [value for _, value in asked]
        if after is not None:
            where = " AND ".join([*conditions, "r.id > ?"])
            query = f"SELECT r.id, r.emitted_us, r.body FROM rows r JOIN steps s ON s.id = r.step_id WHERE {where}"
            return self._all(f"{query} ORDER BY r.id LIMIT ?", (*values, after, last))
        if attempt is None:
            conditions.append(_CURRENT)
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        order = "s.step DESC, s.attempt DESC" if axis is not None else "r.id DESC"
        tables = "rows r JOIN steps s ON s.id = r.step_id AND s.last_row_id = r.id"
        query = f"SELECT r.id, r.emitted_us, r.body FROM {tables} {where} ORDER BY {order} LIMIT ?"
        return self._all(query, (*values, last))[::-1]

    def rows_that_hold(
        self, needles: Sequence[bytes], *, run: str | None, attempt: int | None, last: int
    ) -> list[bytes]:
        """The JSON of the newest rows with one of these texts in them, oldest first; older ones than the last
        MAX_SCANNED_ROWS are not looked at."""
        if run is not None:
            self._run_id(run)
        holding = " OR ".join("instr(r.body, ?)" for _ in needles)
        conditions = ["r.id > (SELECT max(id) FROM rows) - ?", f"({holding})", "(? IS NULL OR s.run = ?)"]
        conditions.append(_CURRENT if attempt is None else "s.attempt = ?")
        values = (MAX_SCANNED_ROWS, *needles, run, run, *(() if attempt is None else (attempt,)))
        tables = "rows r JOIN steps s ON s.id = r.step_id AND s.last_row_id = r.id"
        query = f"SELECT r.body FROM {tables} WHERE {' AND '.join(conditions)} ORDER BY r.id DESC LIMIT ?"
        return [body for (body,) in self._all(query, (*values, last))][::-1]

    def series(self, run: str | None = None) -> list[dict[str, object]]:
        """The keys that have numbers, by run and axis."""
        if run is not None:
            self._run_id(run)
        query = "SELECT runs.name, axis, key FROM series JOIN runs ON runs.id = run_id"
        where, values = (" WHERE runs.name = ?", (run,)) if run is not None else ("", ())
        found = self._all(f"{query}{where} ORDER BY runs.name, axis, key", values)
        return [{"run": name, "axis": axis, "key": key} for name, axis, key in found]

    def curves(
        self,
        keys: Sequence[str],
        *,
        run: str | None = None,
        last: int | None = None,
        attempt: int | None = None,
        max_points: int | None = None,
    ) -> list[Curve]:
        """Keys over steps. run None: of every run that has them. Raises UnknownName."""
        if run is not None:
            self._run_id(run)
        known = self._all(
            "SELECT runs.name, series.axis, series.key, series.id FROM series JOIN runs ON runs.id = run_id"
            " WHERE (? IS NULL OR runs.name = ?) ORDER BY runs.last_us DESC, series.axis",
            (run, run),
        )
        curves = []
        for key in keys:
            of_key = [item for item in known if item[2] == key]
            if not of_key:
                raise UnknownName("key", key, sorted({item[2] for item in known}))
            curves += [self._curve(*item, last=last, attempt=attempt, max_points=max_points) for item in of_key]
        return curves

    def logs(
        self,
        wanted: LogFilter,
        *,
        last: int,
        after: int | None = None,
        before: int | None = None,
        max_bytes: int = MAX_SCANNED_BYTES,
    ) -> LogPage:
        """The newest lines that are wanted, before a record if one is given; with `after` the oldest after it."""
        run_id = self._run_id(wanted.run) if wanted.run is not None else None
        if after is not None:
            return self._logs_after(wanted, run_id, last=last, after=after, max_bytes=max_bytes)
        lines: list[LogLine] = []
        scanned, num_bytes = before if before is not None else self.ids().record_id + 1, 0
        while True:
            chunk = self._batches(run_id, wanted.level, f"b.id <= {(scanned - 1) >> RECORD_BITS}", "DESC")
            for batch_id, received_us, body in chunk:
                found = list(_lines_of(wanted, batch_id, received_us, body, below=before))
                lines += reversed(found)
                scanned, num_bytes = batch_id << RECORD_BITS, num_bytes + len(body)
                if len(lines) >= last:
                    lines = lines[:last]
                    return LogPage(lines[::-1], True, lines[-1].record_id)
            if not chunk:
                return LogPage(lines[::-1], True, 0)
            if num_bytes > max_bytes:
                return LogPage(lines[::-1], False, scanned)

    def alerts(
        self, *, run: str | None = None, firing: bool | None = None, last: int = 100, after: int | None = None
    ) -> list[dict[str, object]]:
        """Changes of alerts, oldest first. firing: of each rule the newest change only, if its state is (not) that."""
        if run is not None:
            self._run_id(run)
        conditions, values = [], []
        if run is not None:
            conditions.append("runs.name = ?")
            values.append(run)
        if after is not None:
            conditions.append("a.id > ?")
            values.append(after)
        if firing is not None:
            conditions.append("a.id IN (SELECT max(id) FROM alerts GROUP BY run_id, rule)")
            conditions.append("a.state = 'firing'" if firing else "a.state <> 'firing'")
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        order = "ASC" if after is not None else "DESC"
        found = self._all(
            f"SELECT a.id, runs.name, a.rule, a.state, a.at_us, a.body FROM alerts a JOIN runs ON runs.id = a.run_id"
            f" {where} ORDER BY a.id {order} LIMIT ?",
            (*values, last),
        )
        alerts = [
            {**orjson.loads(body), "id": alert_id, "run": name, "rule": rule, "state": state, "at_us": at_us}
            for alert_id, name, rule, state, at_us, body in found
        ]
        return alerts if after is not None else alerts[::-1]

    def batches_after(self, batch_id: int, *, limit: int = CHUNK_BATCHES) -> list[tuple[int, str, int, int, bytes]]:
        """(id, run, microseconds when it came, highest level, lines) of the next batches."""
        return self._all(
            "SELECT b.id, runs.name, b.received_us, b.top_level, b.body FROM batches b JOIN runs ON runs.id = b.run_id"
            " WHERE b.id > ? ORDER BY b.id LIMIT ?",
            (batch_id, limit),
        )

    # -- inside

    def _logs_after(self, wanted: LogFilter, run_id: int | None, *, last: int, after: int, max_bytes: int) -> LogPage:
        lines: list[LogLine] = []
        scanned, num_bytes = after, 0
        while True:
            chunk = self._batches(run_id, wanted.level, f"b.id >= {(scanned + 1) >> RECORD_BITS}", "ASC")
            for batch_id, received_us, body in chunk:
                lines += _lines_of(wanted, batch_id, received_us, body, above=after)
                scanned, num_bytes = ((batch_id + 1) << RECORD_BITS) - 1, num_bytes + len(body)
                if len(lines) >= last:
                    return LogPage(lines[:last], True, after)
            if not chunk or num_bytes > max_bytes:
                return LogPage(lines, not chunk, scanned)

    def _batches(self, run_id: int | None, level: int, place: str, order: str) -> list[tuple[int, int, bytes]]:
        where = f"WHERE {place} AND b.top_level >= ?" + (" AND b.run_id = ?" if run_id is not None else "")
        values = (level, run_id) if run_id is not None else (level,)
        query = f"SELECT b.id, b.received_us, b.body FROM batches b {where} ORDER BY b.id {order} LIMIT {CHUNK_BATCHES}"
        return self._all(query, values)

    def _curve(
        self,
        run: str,
        axis: str,
        key: str,
        series_id: int,
        *,
        last: int | None,
        attempt: int | None,
        max_points: int | None,
    ) -> Curve:
        newer = self._all("SELECT attempt, first_step FROM attempts WHERE run = ? AND axis = ?", (run, axis))
        condition, values = ("AND attempt = ?", (attempt,)) if attempt is not None else ("", ())
        query = (
            f"SELECT step, attempt, value FROM points WHERE series_id = ? {condition} ORDER BY step DESC, attempt DESC"
        )
        points = []
        for step, of_attempt, value in self._rows(query, (series_id, *values)):
            superseded = attempt is None and any(a > of_attempt and first <= step for a, first in newer)
            if not superseded:
                points.append((step, of_attempt, value))
                if last is not None and len(points) >= last:
                    break
        points.reverse()
        if max_points is not None:
            points = [points[index] for index in thinned([value for *_, value in points], max_points)]
        steps, attempts, numbers = zip(*points, strict=True) if points else ((), (), ())
        return Curve(run, axis, key, list(steps), list(attempts), list(numbers))

    def _axes(self, run_id: int, run: str) -> dict[str, int]:
        axes = self._all("SELECT DISTINCT axis FROM series WHERE run_id = ? ORDER BY axis", (run_id,))
        newest = "SELECT max(step) FROM steps WHERE run = ? AND axis = ?"
        return {axis: self._all(newest, (run, axis))[0][0] for (axis,) in axes}

    def _run_id(self, run: str) -> int:
        found = self._all("SELECT id FROM runs WHERE name = ?", (run,))
        if not found:
            raise UnknownName("run", run, [name for (name,) in self._all("SELECT name FROM runs")])
        return int(found[0][0])

    def _all(self, query: str, values: Sequence[object] = ()) -> list[tuple]:  # type: ignore[type-arg]
        return list(self._rows(query, values))

    def _rows(self, query: str, values: Sequence[object] = ()) -> Iterator[tuple]:  # type: ignore[type-arg]
        if self._deadline is not None:
            deadline = self._deadline
            if time.monotonic() > deadline:
                raise TookTooLong
            self._connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            yield from self._connection.execute(query, values)
        except sqlite3.OperationalError as error:
            if "interrupted" in str(error):
                raise TookTooLong from None
            raise
        finally:
            self._connection.set_progress_handler(None, 0)


def closest(name: str, known: Sequence[str], *, limit: int = 5) -> list[str]:
    """The names that are most like one that is not there: those that hold it first."""
    lowered = name.lower()
    holding = [item for item in known if lowered in item.lower()]
    near = difflib.get_close_matches(name, known[:5000], n=limit, cutoff=0.5)
    ends = difflib.get_close_matches(lowered.rpartition("/")[2], [k.rpartition("/")[2] for k in known[:5000]], n=2)
    by_end = [item for item in known if item.rpartition("/")[2] in ends]
    return list(dict.fromkeys([*holding[:limit], *near, *by_end]))[:limit]


def _lines_of(
    wanted: LogFilter, batch_id: int, received_us: int, body: bytes, *, above: int = -1, below: int | None = None
) -> Iterator[LogLine]:
    if not wanted.may_match(body):
        return
    for index, line in enumerate(body.split(b"\n")):
        record_id = (batch_id << RECORD_BITS) + index
        if record_id > above and (below is None or record_id < below) and wanted.match(line) is not None:
            yield LogLine(record_id, received_us, line)


def _open(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise NoStore(f"{path} is not there: no metrics service has worked here")
    plain = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    error: Exception | None = None
    for options in ("mode=ro", f"mode=ro{plain}"):  # a folder that cannot be written has no room for SQLite's index
        try:
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?{options}", uri=True, check_same_thread=False, isolation_level=None
            )
            connection.execute("PRAGMA busy_timeout = 5000")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.Error as failed:
            error = failed
            continue
        if version != SCHEMA_VERSION:
            connection.close()
            remedy = "Start the metrics service on it once: it converts it." if version < SCHEMA_VERSION else ""
            raise NoStore(f"{path} has schema {version}, this version reads {SCHEMA_VERSION}. {remedy}".strip())
        return connection
    raise NoStore(f"{path} cannot be read: {error}")
