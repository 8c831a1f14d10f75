"""A store and its writer within the test's process."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from furlong.jsonline import Secrets
from services.metrics.intake import RecordsIn, Taken
from services.metrics.rows import RowReader
from services.metrics.writer import StoreFailed, Writer

LIMIT_S = 20.0


class Store:
    """Takes records as if a producer had sent them."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.deaths: list[str] = []
        options = {"row_timeout_s": 3600.0, **options}
        self.writer = Writer(path, secrets=Secrets(), on_death=self.deaths.append, **options)
        self.writer.start()
        self.reader = RowReader(path)
        self._next: dict[tuple[str, int], int] = {}

    def take(self, *bodies: bytes, producer: str = "r/p", incarnation: int = 1) -> Taken:
        """Store records; done when they are on disk."""
        first = self._next.get((producer, incarnation), 1)
        self._next[producer, incarnation] = first + len(bodies)
        return self.writer.submit(RecordsIn(producer, incarnation, first, bodies)).result(LIMIT_S)

    def send_until_taken(self, batch: RecordsIn) -> Taken:
        """As a producer does that is told that the store fails."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            with suppress(StoreFailed):
                return self.writer.submit(batch).result(LIMIT_S)
        raise AssertionError("it was never taken")

    def rows(self) -> list[dict[str, Any]]:
        """All rows as they were handed on."""
        return [orjson.loads(row.body) for row in self.reader.after(0, 100_000)]

    def bodies(self) -> list[bytes]:
        """All records, in order."""
        return [body for batch in self.reader.batches_after(0, 100_000) for body in batch.bodies]

    def close(self) -> None:
        self.reader.close()
        self.writer.close(LIMIT_S)


@contextmanager
def store(path: Path, **options: Any) -> Iterator[Store]:
    """A store that works while it is entered."""
    opened = Store(path, **options)
    try:
        yield opened
    finally:
        opened.close()


def ask(path: Path, query: str) -> list[tuple[Any, ...]]:
    """A question to a store that is closed."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def line(number: int, **more: object) -> bytes:
    """A log line of our own form, of the year 2026."""
    return orjson.dumps({"ts": "2026-01-01T00:00:00.000000Z", "level": "info", "run": "r", "number": number, **more})
