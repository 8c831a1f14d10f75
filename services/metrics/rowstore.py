"""Rows in the making, in the store: adds parts, decides when a row is handed on, keeps what was handed on.

A row is handed on when all its parts are in, or after its time is up, marked incomplete; later parts amend it.
Runs in the writer's thread, inside its transaction.
"""

import math
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from services.metrics.points import Points
from services.metrics.reducer import Part, RowKey, Step, dump_contribution, load_contribution, merge, row_line
from services.metrics.rows import Row
from services.metrics.runs import Runs
from services.metrics.soundness import is_contribution, is_names, is_row

MAX_CACHED_STEPS = 256
MAX_CHANGED = 2_048
"""Steps that one transaction changed and holds; more are handed on, or saved, before it ends."""
MAX_DUE = 1_024
"""Rows that wait no longer, of one commit: that many more come with the next one, and nobody waits long."""
MAX_WAITING = 100_000
"""Rows that may wait for a part; with more, the oldest are handed on as they are."""


@dataclass
class _Stored:
    step_id: int
    step: Step
    last_row_id: int | None


class RowStore:
    """Holds a cache of the newest steps; the store has the same after each commit."""

    def __init__(
        self, connection: sqlite3.Connection, runs: Runs, report: Callable[[str, str], None], *, row_timeout_s: float
    ) -> None:
        self.report = report
        self._connection, self._runs = connection, runs
        self._points = Points(connection)
        self._attempts = Attempts(connection)
        self._row_timeout_s = row_timeout_s
        self._cache: OrderedDict[RowKey, _Stored] = OrderedDict()
        self._dirty: dict[RowKey, _Stored] = {}
        self._emitted: list[Row] = []
        self._waiting: dict[RowKey, float] = {}
        """When the time of each is up, by a clock that no one sets; the oldest first."""
        self._knows_waiting = False

    def begin(self) -> None:
        """Within a transaction, before anything else. Raises sqlite3.Error."""
        if not self._knows_waiting:
            self._load_waiting()

    def forget(self) -> None:
        """What is held may not be in the store, as after a rollback. Reads nothing: it cannot fail."""
        self._cache.clear()
        self._dirty.clear()
        self._emitted = []
        self._points.forget()
        self._attempts.forget()
        self._knows_waiting = False

    def add(self, part: Part, *, producer: str, incarnation: int) -> None:
        """Add a part to its row."""
        stored = self._stored(part.key)
        for problem in merge(stored.step, part, producer=producer, incarnation=incarnation):
            self.report(f"{part.key.axis} {part.key.step}", problem)
        contribution = stored.step.contributions[part.part, producer]
        try:
            body = dump_contribution(contribution)
        except (TypeError, ValueError, ArithmeticError) as error:  # one bad record must not block the rest for ever
            self._cache.pop(part.key, None)
            self.report(f"{part.key.axis} {part.key.step}", f"cannot be kept: {error!r}")
            return
        self._connection.execute(
            "INSERT OR REPLACE INTO contributions VALUES (?, ?, ?, ?, ?)",
            (stored.step_id, part.part, producer, contribution.incarnation, body),
        )
        self._dirty[part.key] = stored
        if len(self._dirty) >= MAX_CHANGED:
            self._emit_changed(set())

    def has_due(self) -> bool:
        """Whether a row's time is up, or it is not known."""
        return not self._knows_waiting or bool(self._due(1))

    def emit_ready(self) -> list[Row]:
        """Hand on what is complete, due, or amended."""
        self._emit_changed(set(self._due(MAX_DUE)))
        rows, self._emitted = self._emitted, []
        return rows

    def _emit_changed(self, due: set[RowKey]) -> None:
        for key in sorted(due | set(self._dirty)):
            stored = self._dirty.get(key) or self._stored(key)
            if key in self._dirty:
                self._save_step(stored)
            if key in due or stored.last_row_id is not None or stored.step.is_complete:
                self._emitted += self._emit(stored)
        self._dirty.clear()

    def emit_waiting(self) -> None:
        """Have everything that waits handed on, incomplete as it is, with this transaction and the next ones."""
        self._waiting = dict.fromkeys(self._waiting, -math.inf)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _due(self, limit: int) -> list[RowKey]:
        now, too_many = time.monotonic(), len(self._waiting) - MAX_WAITING
        due: list[RowKey] = []
        for key, until in self._waiting.items():
            if len(due) >= limit or (until > now and len(due) >= too_many):
                break
            due.append(key)
        return due

    def _emit(self, stored: _Stored) -> list[Row]:
        """The row; nothing when nothing changed."""
        self._waiting.pop(stored.step.key, None)
        amends = stored.last_row_id is not None
        try:
            body, conflicts = row_line(stored.step, complete=stored.step.is_complete, amends=amends)
        except (TypeError, ValueError, ArithmeticError) as error:  # one bad row must not block the rest for ever
            self.report(f"{stored.step.key.axis} {stored.step.key.step}", f"cannot be reduced: {error!r}")
            return []
        prior = self._prior(stored)
        if prior is not None and _same_but_for_mark(prior, body):
            return []
        for conflict in conflicts:
            self.report(f"{stored.step.key.axis} {stored.step.key.step}", conflict)
        return [self._put(stored, body, prior)]

    def _put(self, stored: _Stored, body: bytes, prior: bytes | None) -> Row:
        key, now_us = stored.step.key, time.time_ns() // 1000
        run_id = self._runs.id_of(key.run, now_us)
        insert = "INSERT INTO rows (step_id, run_id, prior_id, emitted_us, body) VALUES (?, ?, ?, ?, ?)"
        values = (stored.step_id, run_id, stored.last_row_id, now_us, body)
        row_id = self._connection.execute(insert, values).lastrowid or 0
        self._connection.execute("UPDATE steps SET last_row_id = ? WHERE id = ?", (row_id, stored.step_id))
        stored.last_row_id = row_id
        self._points.write(run_id, orjson.loads(body), orjson.loads(prior) if prior is not None else None)
        return Row(row_id, key.run, body, prior, self._attempts.is_current(key), now_us)

    def _prior(self, stored: _Stored) -> bytes | None:
        if stored.last_row_id is None:
            return None
        find = "SELECT body FROM rows WHERE id = ?"
        found = self._connection.execute(find, (stored.last_row_id,)).fetchone()
        if found is None:
            return None
        if not is_row(found[0]):
            raise sqlite3.DatabaseError(f"row {stored.last_row_id} is no JSON of ours")
        return bytes(found[0])

    def _save_step(self, stored: _Stored) -> None:
        self._connection.execute(
            "UPDATE steps SET rollout_id = ?, expected = ? WHERE id = ?",
            (stored.step.rollout_id, orjson.dumps(sorted(stored.step.expected)), stored.step_id),
        )

    def _stored(self, key: RowKey) -> _Stored:
        stored = self._cache.get(key)
        if stored is None:
            stored = self._load(key) or self._begin(key)
            self._cache[key] = stored
            while len(self._cache) > MAX_CACHED_STEPS:
                oldest, dropped = self._cache.popitem(last=False)
                if oldest in self._dirty:
                    self._cache[oldest] = dropped
                    break
        return stored

    def _load(self, key: RowKey) -> _Stored | None:
        find = (
            "SELECT id, rollout_id, expected, last_row_id FROM steps"
            " WHERE run = ? AND axis = ? AND attempt = ? AND step = ?"
        )
        found = self._connection.execute(find, (key.run, key.axis, key.attempt, key.step)).fetchone()
        if found is None:
            return None
        step_id, rollout_id, expected, last_row_id = found
        said = self._connection.execute(
            "SELECT part, producer, incarnation, body FROM contributions WHERE step_id = ?", (step_id,)
        ).fetchall()
        if not is_names(expected) or not all(is_contribution(body) for *_, body in said):
            raise sqlite3.DatabaseError(f"step {step_id}: what its parts said is no JSON of ours")
        contributions = {(p, who): load_contribution(incarnation, body) for p, who, incarnation, body in said}
        return _Stored(step_id, Step(key, set(orjson.loads(expected)), rollout_id, contributions), last_row_id)

    def _begin(self, key: RowKey) -> _Stored:
        now_us = time.time_ns() // 1000
        insert = "INSERT INTO steps (run, axis, step, attempt, expected, opened_us) VALUES (?, ?, ?, ?, '[]', ?)"
        cursor = self._connection.execute(insert, (key.run, key.axis, key.step, key.attempt, now_us))
        self._waiting[key] = time.monotonic() + self._row_timeout_s
        self._attempts.begin(key)
        return _Stored(cursor.lastrowid or 0, Step(key), None)

    def _load_waiting(self) -> None:
        find = "SELECT run, axis, step, attempt, opened_us FROM steps WHERE last_row_id IS NULL ORDER BY opened_us"
        now, now_us = time.monotonic(), time.time_ns() // 1000
        # one that was begun in the future was begun before the clock was set back
        waited_s = ((RowKey(*key), max(0, now_us - at_us) / 1e6) for *key, at_us in self._connection.execute(find))
        self._waiting = {key: now + self._row_timeout_s - waited for key, waited in waited_s}
        self._knows_waiting = True


class Attempts:
    """Where each attempt began on each axis: what older attempts said from there on no longer stands.

    It counts from the first record of the newer attempt, also before its first row is complete: a late row of a killed
    attempt never follows as if it were current.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._first_steps: dict[tuple[str, str], dict[int, int]] = {}

    def forget(self) -> None:
        """After a rollback."""
        self._first_steps.clear()

    def begin(self, key: RowKey) -> None:
        """A step of an attempt begins."""
        known = self._of(key)
        first = known.get(key.attempt)
        if first is None or key.step < first:
            known[key.attempt] = key.step
            put = "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?)"
            self._connection.execute(put, (key.run, key.axis, key.attempt, key.step))

    def is_current(self, key: RowKey) -> bool:
        """Whether no newer attempt has come to the step."""
        return not any(number > key.attempt and first <= key.step for number, first in self._of(key).items())

    def _of(self, key: RowKey) -> dict[int, int]:
        place = (key.run, key.axis)
        if place not in self._first_steps:
            if len(self._first_steps) > 10_000:
                self._first_steps.clear()
            find = "SELECT attempt, first_step FROM attempts WHERE run = ? AND axis = ?"
            self._first_steps[place] = dict(self._connection.execute(find, place))
        return self._first_steps[place]


def _same_but_for_mark(prior: bytes, body: bytes) -> bool:
    old, new = orjson.loads(prior), orjson.loads(body)
    old.pop("amends", None)
    new.pop("amends", None)
    return bool(old == new)
