"""Rows in the making, in the store: adds parts, decides when a row is handed on, keeps what was handed on.

A row is handed on when all its parts are in, or after its time is up, marked incomplete; later parts amend it.
Runs in the writer's thread, inside its transaction.
"""

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from services.metrics.reducer import Part, RowKey, Step, dump_contribution, load_contribution, merge, row_line

MAX_CACHED_STEPS = 256


@dataclass
class _Stored:
    step_id: int
    step: Step
    last_row_id: int | None


class RowStore:
    """Holds a cache of the newest steps; the store has the same after each commit."""

    def __init__(
        self, connection: sqlite3.Connection, report: Callable[[str, str], None], *, row_timeout_s: float
    ) -> None:
        self.report = report
        self._connection = connection
        self._row_timeout_us = int(row_timeout_s * 1e6)
        self._cache: OrderedDict[RowKey, _Stored] = OrderedDict()
        self._dirty: dict[RowKey, _Stored] = {}
        self._waiting: dict[RowKey, int] = {}  # row -> when its first part came
        self._load_waiting()

    def forget(self) -> None:
        """After a rollback: what is held may not be in the store."""
        self._cache.clear()
        self._dirty.clear()
        self._load_waiting()

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

    def has_due(self, now: float) -> bool:
        """Whether a row's time is up."""
        return bool(self._due(now))

    def emit_ready(self, now: float) -> int:
        """Hand on what is complete, due, or amended; how many rows."""
        due = set(self._due(now))
        num_rows = 0
        for key in sorted(due | set(self._dirty)):
            stored = self._dirty.get(key) or self._stored(key)
            if key in self._dirty:
                self._save_step(stored)
            if key in due or stored.last_row_id is not None or stored.step.is_complete:
                num_rows += self._emit(stored)
        self._dirty.clear()
        return num_rows

    def emit_waiting(self) -> None:
        """Hand on everything that waits, incomplete as it is."""
        for key in sorted(self._waiting):
            stored = self._dirty.get(key) or self._stored(key)
            self._save_step(stored)
            self._dirty.pop(key, None)
            self._emit(stored)

    def set_cursor(self, sink: str, row_id: int, position: int) -> None:
        """Remember how far a sink is, and its own position there."""
        self._connection.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?, ?)", (sink, row_id, position))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _due(self, now: float) -> list[RowKey]:
        limit = int(now * 1e6) - self._row_timeout_us
        return [key for key, opened_us in self._waiting.items() if opened_us <= limit]

    def _emit(self, stored: _Stored) -> int:
        """1, or 0 when nothing changed."""
        self._waiting.pop(stored.step.key, None)
        amends = stored.last_row_id is not None
        try:
            body, conflicts = row_line(stored.step, complete=stored.step.is_complete, amends=amends)
        except (TypeError, ValueError, ArithmeticError) as error:  # one bad row must not block the rest for ever
            self.report(f"{stored.step.key.axis} {stored.step.key.step}", f"cannot be reduced: {error!r}")
            return 0
        if amends:
            prior = self._connection.execute("SELECT body FROM rows WHERE id = ?", (stored.last_row_id,)).fetchone()
            if prior and _same_but_for_mark(prior[0], body):
                return 0
        for conflict in conflicts:
            self.report(f"{stored.step.key.axis} {stored.step.key.step}", conflict)
        insert = "INSERT INTO rows (step_id, prior_id, body) VALUES (?, ?, ?)"
        row_id = self._connection.execute(insert, (stored.step_id, stored.last_row_id, body)).lastrowid
        self._connection.execute("UPDATE steps SET last_row_id = ? WHERE id = ?", (row_id, stored.step_id))
        stored.last_row_id = row_id
        return 1

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
        )
        contributions = {(p, who): load_contribution(incarnation, body) for p, who, incarnation, body in said}
        return _Stored(step_id, Step(key, set(orjson.loads(expected)), rollout_id, contributions), last_row_id)

    def _begin(self, key: RowKey) -> _Stored:
        now_us = time.time_ns() // 1000
        insert = "INSERT INTO steps (run, axis, step, attempt, expected, opened_us) VALUES (?, ?, ?, ?, '[]', ?)"
        cursor = self._connection.execute(insert, (key.run, key.axis, key.step, key.attempt, now_us))
        self._waiting[key] = now_us
        return _Stored(cursor.lastrowid or 0, Step(key), None)

    def _load_waiting(self) -> None:
        find = "SELECT run, axis, step, attempt, opened_us FROM steps WHERE last_row_id IS NULL"
        self._waiting = {RowKey(*key): opened_us for *key, opened_us in self._connection.execute(find)}


def _same_but_for_mark(prior: bytes, body: bytes) -> bool:
    old, new = orjson.loads(prior), orjson.loads(body)
    old.pop("amends", None)
    new.pop("amends", None)
    return bool(old == new)
