"""Reads rows from the store, beside its writer: for the sinks, and for who asks over HTTP."""

import asyncio
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path

from services.metrics.store import open_reader

# a newer attempt that reached back to this step or before it has taken the row's place
_NOT_SUPERSEDED = """NOT EXISTS (SELECT 1 FROM steps n WHERE n.run = s.run AND n.axis = s.axis AND n.attempt > s.attempt
    AND n.step <= s.step AND n.last_row_id IS NOT NULL)"""


@dataclass(frozen=True)
class Row:
    """One row as it was handed on."""

    row_id: int
    body: bytes
    """The JSON line, without its newline."""
    prior: bytes | None
    """What it amends."""
    is_current: bool
    """False: a newer attempt has a row for this step."""


class RowReader:
    """Any thread; one reads at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection = open_reader(path)

    def after(self, row_id: int, limit: int) -> list[Row]:
        """The next rows."""
        found = self._all(
            f"SELECT r.id, r.body, p.body, {_NOT_SUPERSEDED} FROM rows r LEFT JOIN rows p ON p.id = r.prior_id"
            " JOIN steps s ON s.id = r.step_id WHERE r.id > ? ORDER BY r.id LIMIT ?",
            (row_id, limit),
        )
        return [Row(row_id, body, prior, bool(current)) for row_id, body, prior, current in found]

    async def async_after(self, row_id: int, limit: int) -> list[Row]:
        """The same, off the event loop."""
        return await asyncio.to_thread(self.after, row_id, limit)

    def newest(self, axis: str, last: int) -> list[bytes]:
        """The last rows of an axis, oldest first, each as it is now, of the newest attempt only."""
        found = self._all(
            f"SELECT r.body FROM steps s JOIN rows r ON r.id = s.last_row_id WHERE s.axis = ? AND {_NOT_SUPERSEDED}"
            " ORDER BY s.step DESC LIMIT ?",
            (axis, last),
        )
        return [body for (body,) in reversed(found)]

    def cursor(self, sink: str) -> tuple[int, int]:
        """How far a sink is, and its own position there."""
        found = self._all("SELECT row_id, position FROM cursors WHERE sink = ?", (sink,))
        return (int(found[0][0]), int(found[0][1])) if found else (0, 0)

    def num_records(self) -> int:
        return int(self._all("SELECT coalesce(max(id), 0) FROM records")[0][0])  # none is ever removed

    def last_row_id(self) -> int:
        return int(self._all("SELECT coalesce(max(id), 0) FROM rows")[0][0])

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _all(self, query: str, values: tuple[object, ...] = ()) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.DatabaseError:  # the file was set aside and made anew meanwhile
                self._connection.close()
                self._connection = open_reader(self._path)
                return self._connection.execute(query, values).fetchall()
