"""Takes batches into the store's open transaction: refuses what is no record, skips what is there, stores the rest.

Runs in the writer's thread only. Never acknowledges: the writer does, after the commit.
"""

import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from furlong.jsonline import Secrets
from services.metrics.reducer import read_part
from services.metrics.rowstore import RowStore

if TYPE_CHECKING:
    from services.metrics.writer import Counts

MAX_RECORD_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class RecordsIn:
    """A batch as it came."""

    producer: str
    incarnation: int
    first_sequence: int
    bodies: tuple[bytes, ...]


@dataclass(frozen=True)
class Taken:
    """What became of a batch."""

    through_sequence: int
    num_refused: int
    first_refusal: str


@dataclass
class _Mark:
    producer_id: int
    through_sequence: int


class Intake:
    """Holds the high-water marks of the producers; the store has the same after each commit."""

    def __init__(self, connection: sqlite3.Connection, rows: RowStore, counts: "Counts", secrets: Secrets) -> None:
        self._connection, self._rows, self._counts, self._secrets = connection, rows, counts, secrets
        self._marks: dict[tuple[str, int], _Mark] = {}

    def forget(self) -> None:
        """After a rollback: what is held may not be in the store."""
        self._marks.clear()

    def take(self, batch: RecordsIn) -> Taken:
        """Store what is new of a batch."""
        mark = self._mark(batch.producer, batch.incarnation)
        known = mark.through_sequence
        if batch.first_sequence > known + 1:
            self._counts.num_missing += batch.first_sequence - known - 1
        now_us = time.time_ns() // 1000
        new: list[tuple[int, int, int, bytes]] = []
        refusals: list[str] = []
        for sequence, body in enumerate(batch.bodies, batch.first_sequence):
            if sequence <= known:
                continue
            if not body:
                self._counts.num_dropped += 1
                continue
            stored = self._take_one(batch, body, refusals)
            if stored is not None:
                new.append((mark.producer_id, sequence, now_us, stored))
        self._connection.executemany(
            "INSERT INTO records (producer_id, sequence, received_us, body) VALUES (?, ?, ?, ?)", new
        )
        mark.through_sequence = max(known, batch.first_sequence + len(batch.bodies) - 1)
        self._connection.execute(
            "UPDATE producers SET through_sequence = ? WHERE id = ?", (mark.through_sequence, mark.producer_id)
        )
        self._counts.num_refused += len(refusals)
        return Taken(mark.through_sequence, len(refusals), refusals[0] if refusals else "")

    def _take_one(self, batch: RecordsIn, body: bytes, refusals: list[str]) -> bytes | None:
        """The body to store; None: it is refused."""
        if len(body) > MAX_RECORD_BYTES:
            refusals.append(f"a record has at most {MAX_RECORD_BYTES} bytes, got {len(body)}")
            return None
        try:
            record = orjson.loads(body)
        except ValueError as error:
            refusals.append(f"not JSON: {error}")
            return None
        if not isinstance(record, dict):
            refusals.append(f"a record is a JSON object, got {type(record).__name__}")
            return None
        if self._secrets.needles and self._secrets.in_line(body):
            record = self._secrets.redact_tree(record)
            body = orjson.dumps(record)
        if record.get("event") == "metrics":  # type: ignore[union-attr]
            try:
                part = read_part(record)  # type: ignore[arg-type]
            except (ValueError, TypeError, ArithmeticError) as error:  # whatever stands in it: never the batch's end
                self._counts.num_bad_metrics += 1
                self._rows.report(batch.producer, str(error))
            else:
                self._rows.add(part, producer=batch.producer, incarnation=batch.incarnation)
        return body

    def _mark(self, producer: str, incarnation: int) -> _Mark:
        mark = self._marks.get((producer, incarnation))
        if mark is None:
            find = "SELECT id, through_sequence FROM producers WHERE producer = ? AND incarnation = ?"
            found = self._connection.execute(find, (producer, incarnation)).fetchone()
            if found is None:
                insert = "INSERT INTO producers (producer, incarnation, through_sequence) VALUES (?, ?, 0)"
                found = (self._connection.execute(insert, (producer, incarnation)).lastrowid, 0)
            if len(self._marks) > 10_000:
                self._marks.clear()
            mark = self._marks[producer, incarnation] = _Mark(*found)
        return mark
