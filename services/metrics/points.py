"""The numbers of the rows once more, by key: what a query of one key reads. Runs in the writer's thread.

A NaN is stored as NULL (SQLite has no NaN); infinities are stored as they are. Raw names stay raw.
"""

import math
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from furlong.records import Number

MAX_CACHED_SERIES = 50_000
_PUT = "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?)"


class Points:
    """Writes points within the writer's transaction; holds the ids of series that it has met."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._series: dict[tuple[int, str, str], int] = {}

    def forget(self) -> None:
        """After a rollback: what is held may not be in the store."""
        self._series.clear()

    def write(self, run_id: int, row: Mapping[str, Any], prior: Mapping[str, Any] | None) -> None:
        """The numbers of a row; of an amended one, what changed. Any: a row's JSON."""
        axis, step, attempt = row["axis"], row["step"], row["attempt"]
        known = dict(numbers_of(prior)) if prior is not None else {}
        new = dict(numbers_of(row))
        changed = [
            (self._id(run_id, axis, key), step, attempt, value)
            for key, value in new.items()
            if key not in known or known[key] != value
        ]
        self._connection.executemany(_PUT, changed)
        gone = [(self._id(run_id, axis, key), step, attempt) for key in known.keys() - new.keys()]
        if gone:
            self._connection.executemany("DELETE FROM points WHERE series_id = ? AND step = ? AND attempt = ?", gone)

    def _id(self, run_id: int, axis: str, key: str) -> int:
        place = (run_id, axis, key)
        series_id = self._series.get(place)
        if series_id is None:
            find = "SELECT id FROM series WHERE run_id = ? AND axis = ? AND key = ?"
            found = self._connection.execute(find, place).fetchone()
            if found is None:
                insert = "INSERT INTO series (run_id, axis, key) VALUES (?, ?, ?)"
                found = (self._connection.execute(insert, place).lastrowid,)
            if len(self._series) >= MAX_CACHED_SERIES:
                self._series.clear()
            series_id = self._series[place] = int(found[0])
        return series_id


def fill_points(connection: sqlite3.Connection) -> None:
    """The points of all rows that stand, in a store that lost them or never had them."""
    points = Points(connection)
    latest = "SELECT r.run_id, r.body FROM steps s JOIN rows r ON r.id = s.last_row_id ORDER BY r.id"
    for run_id, body in connection.execute(latest):
        points.write(run_id, orjson.loads(body), None)


def numbers_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """The values of a row as SQLite holds them."""
    for key, value in row["values"].items():
        yield key, _stored(value)


def _stored(value: Number | str) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number
