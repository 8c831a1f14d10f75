"""Where a tailer's records go: the writer, under one producer whose numbers go on over restarts.

The incarnation is always the same: to the store a new one says its parts of a row anew, and what a file said before a
restart would no longer count.
"""

import sqlite3
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

from services.metrics.intake import RecordsIn
from services.metrics.writer import Writer

INCARNATION = 1
LOAD_LIMIT_S = 60.0


class StoreLink(Protocol):
    """What a tailer needs of a store."""

    def load(self) -> dict[str, bytes]:
        """The marks."""
        ...

    def submit(self, bodies: tuple[bytes, ...], marks: Mapping[str, bytes | None]) -> "Future[object]":
        """Save both in one commit. The next call repeats what failed."""
        ...

    def saved(self, num_records: int) -> None:
        """The last submission is on disk."""
        ...


class WriterLink:
    """The service's own store. Used by one thread."""

    def __init__(self, writer: Writer, *, producer: str, prefixes: tuple[str, ...]) -> None:
        self._writer, self._producer, self._prefixes = writer, producer, prefixes
        self._next = 1

    def load(self) -> dict[str, bytes]:
        """The marks of all prefixes; finds out where the numbers go on."""
        marks, through = self._writer.execute(self._read).result(LOAD_LIMIT_S)
        self._next = through + 1
        return marks

    def submit(self, bodies: tuple[bytes, ...], marks: Mapping[str, bytes | None]) -> "Future[object]":
        """One batch under the next numbers."""
        if not bodies:
            return self._writer.put_marks(marks)  # type: ignore[return-value]
        return self._writer.submit(RecordsIn(self._producer, INCARNATION, self._next, bodies, marks))  # type: ignore[return-value]

    def saved(self, num_records: int) -> None:
        """Its numbers are taken."""
        self._next += num_records

    def _read(self, connection: sqlite3.Connection) -> tuple[dict[str, bytes], int]:
        marks: dict[str, bytes] = {}
        for prefix in self._prefixes:
            find = "SELECT name, body FROM marks WHERE substr(name, 1, ?) = ?"
            marks |= {str(name): bytes(body) for name, body in connection.execute(find, (len(prefix), prefix))}
        find = "SELECT through_sequence FROM producers WHERE producer = ? AND incarnation = ?"
        found = connection.execute(find, (self._producer, INCARNATION)).fetchone()
        return marks, int(found[0]) if found else 0
