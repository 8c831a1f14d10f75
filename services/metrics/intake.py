"""Takes batches into the store's open transaction: refuses what is no record, skips what is there, stores the rest.

Runs in the writer's thread only. Never acknowledges: the writer does, after the commit. A batch whose records are all
well costs little a record; only one that holds something bad, or several runs, is looked at record by record.
"""

import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from furlong.asking.levels import level_number
from furlong.jsonline import Secrets
from services.metrics.counts import Counts
from services.metrics.mildjson import read_object
from services.metrics.noticed import Noticed, left_out
from services.metrics.reducer import read_part
from services.metrics.rows import StoredBatch
from services.metrics.rowstore import RowStore
from services.metrics.runs import Runs
from services.metrics.skew import Skew

MAX_RECORD_BYTES = 4 * 1024 * 1024
MAX_BATCH_RECORDS = 4096
MAX_BATCH_BYTES = 4 * 1024 * 1024
NOTABLE_EVENTS = frozenset(
    {
        *("phase", "heartbeat", "telemetry_dropped", "rows_dropped", "run_started", "run_ended"),
        *("engine_gone", "engine_ready", "service_ready", "service_stopping"),
    }
)
"""Events of which the alerts are told, record by record."""

_ROWS_A_STATEMENT = 16
_INSERT = (
    "INSERT INTO batches"
    " (id, run_id, producer_id, first_sequence, num_records, received_us, top_level, crc, body) VALUES "
)
_ROW = "(?, ?, ?, ?, ?, ?, ?, ?, ?)"
_LOOKED_AT = NOTABLE_EVENTS | {"metrics"}

Record = dict[str, Any]  # Any: JSON


@dataclass(frozen=True)
class RecordsIn:
    """A batch as it came."""

    producer: str
    incarnation: int
    first_sequence: int
    """0: the next ones, for a sender that does not number its records."""
    bodies: tuple[bytes, ...]
    marks: Mapping[str, bytes | None] = field(default_factory=dict)
    """Small states to keep with it, by name: where the sender was in what it reads. None: to forget."""


@dataclass(frozen=True)
class Taken:
    """What became of a batch."""

    through_sequence: int
    num_refused: int
    first_refusal: str
    num_known: int = 0
    """Records that were in the store already."""
    num_noticed: int = 0
    """Metrics records that are taken as log lines only, or without some of their values."""
    noticed: tuple[tuple[int, str], ...] = ()
    """The first of these: which of the batch, and why."""


@dataclass(eq=False)
class _Producer:
    producer_id: int
    through_sequence: int


@dataclass
class _Good:
    """The records of a batch that are taken."""

    sequences: Sequence[int]
    bodies: Sequence[bytes]
    records: Sequence[Record]
    joined: bytes | None = None
    """The bodies in one, when they are joined already."""


class Intake:
    """Holds the high-water marks of the producers; the store has the same after each commit."""

    def __init__(
        self, connection: sqlite3.Connection, runs: Runs, rows: RowStore, counts: Counts, secrets: Secrets
    ) -> None:
        self._connection, self._runs, self._rows = connection, runs, rows
        self._counts, self._secrets = counts, secrets
        self._skew = Skew(counts)
        self._producers: dict[tuple[str, int], _Producer] = {}
        self._moved: set[_Producer] = set()
        self._unwritten: list[tuple[object, ...]] = []
        self._unwritten_bytes = 0
        self._last_batch_id: int | None = None
        self._num_stored = 0
        self.batches: list[StoredBatch] = []
        """Stored since the last `finish`."""
        self.notable: list[tuple[str, Record]] = []
        """Run and record, since the last `finish`."""

    def forget(self) -> None:
        """After a rollback: what is held may not be in the store."""
        self._producers.clear()
        self._moved.clear()
        self._unwritten.clear()
        self._unwritten_bytes = 0
        self._last_batch_id = None
        self._num_stored = 0
        self.batches, self.notable = [], []

    def save(self) -> None:
        """Within the transaction that ends now."""
        self._write()
        if self._moved:
            update = "UPDATE producers SET through_sequence = ? WHERE id = ?"
            self._connection.executemany(update, [(one.through_sequence, one.producer_id) for one in self._moved])
            self._moved.clear()
        if self._num_stored:
            add = "UPDATE totals SET value = value + ? WHERE name = 'records_stored'"
            self._connection.execute(add, (self._num_stored,))
            self._num_stored = 0

    def finish(self) -> tuple[list[StoredBatch], list[tuple[str, Record]]]:
        """After the commit: what was stored with it."""
        batches, notable = self.batches, self.notable
        self.batches, self.notable = [], []
        return batches, notable

    def take(self, batch: RecordsIn) -> Taken:
        """Store what is new of a batch."""
        producer = self._producer(batch.producer, batch.incarnation)
        known = producer.through_sequence
        first = batch.first_sequence or known + 1
        if first > known + 1:
            self._counts.num_missing += first - known - 1
        refusals: list[str] = []
        noticed = Noticed(first)
        num_known = min(len(batch.bodies), max(0, known + 1 - first))
        bodies = batch.bodies[num_known:] if num_known else batch.bodies
        first += num_known
        for piece in _pieces(bodies):  # one after the other: a large batch is never held twice as a whole
            good = self._all_good(first, piece) or self._one_by_one(first, piece, refusals)
            if good.bodies:
                self._store(batch, producer.producer_id, good, noticed)
            first += len(piece)
            producer.through_sequence = first - 1
            self._moved.add(producer)
        for name, mark in batch.marks.items():
            put_mark(self._connection, name, mark)
        self._counts.num_refused += len(refusals)
        first_refusal, told = refusals[0] if refusals else "", tuple(noticed.told)
        return Taken(producer.through_sequence, len(refusals), first_refusal, num_known, noticed.num, told)

    def _all_good(self, first: int, bodies: tuple[bytes, ...]) -> _Good | None:
        """The usual case, without a step of Python a record. None: something is to be looked at."""
        if max(map(len, bodies)) > MAX_RECORD_BYTES or not min(map(len, bodies)):
            return None
        joined = b"\n".join(bodies)
        if joined.count(b"\n") != len(bodies) - 1 or (self._secrets.needles and self._secrets.in_line(joined)):
            return None
        try:
            records = list(map(orjson.loads, bodies))
        except ValueError:
            return None
        if set(map(type, records)) != {dict}:
            return None
        return _Good(range(first, first + len(bodies)), bodies, records, joined)

    def _one_by_one(self, first: int, bodies: Sequence[bytes], refusals: list[str]) -> _Good:
        good = _Good([], [], [])
        for sequence, body in enumerate(bodies, first):
            if not body:
                self._counts.num_dropped += 1
                continue
            try:
                record, body = _parse(body)
                if self._secrets.needles and self._secrets.in_line(body):
                    record, body = self._without_secrets(record)
            except ValueError as error:
                refusals.append(str(error))
                continue
            good.sequences.append(sequence)  # type: ignore[attr-defined]
            good.bodies.append(body)  # type: ignore[attr-defined]
            good.records.append(record)  # type: ignore[attr-defined]
        return good

    def _without_secrets(self, record: Record) -> tuple[Record, bytes]:
        try:
            clean: Record = self._secrets.redact_tree(record)  # type: ignore[assignment]
            return clean, orjson.dumps(clean)
        except (TypeError, RecursionError):
            raise ValueError("holds a secret, and is nested too deeply to take it out") from None

    def _store(self, batch: RecordsIn, producer_id: int, good: _Good, noticed: Noticed) -> None:
        now_us = time.time_ns() // 1000
        self._skew.look(good.records, now_us, batch.producer)
        for run, part in _by_run(good):
            run_id = self._runs.id_of(run, now_us)
            self._insert(batch, run, run_id, producer_id, part, now_us)
            self._look(batch, run, part, noticed)

    def _insert(self, batch: RecordsIn, run: str, run_id: int, producer_id: int, piece: _Good, now_us: int) -> None:
        body = piece.joined if piece.joined is not None else b"\n".join(piece.bodies)
        first, level, number = piece.sequences[0], _top_level(piece.records), len(piece.bodies)
        batch_id = self._next_batch_id()
        self._unwritten.append((batch_id, run_id, producer_id, first, number, now_us, level, zlib.crc32(body), body))
        self._unwritten_bytes += len(body)
        if len(self._unwritten) >= _ROWS_A_STATEMENT or self._unwritten_bytes >= MAX_BATCH_BYTES:
            self._write()
        self._num_stored += number
        bodies = tuple(piece.bodies)
        self.batches.append(StoredBatch(batch_id, run, batch.producer, first, now_us, bodies, level))

    def _write(self) -> None:
        """Several rows with one statement: each statement lets go of the interpreter and waits to have it back."""
        rows = self._unwritten
        if rows:
            self._connection.execute(_INSERT + ",".join([_ROW] * len(rows)), [value for row in rows for value in row])
            rows.clear()
            self._unwritten_bytes = 0

    def _next_batch_id(self) -> int:
        if self._last_batch_id is None:
            find = "SELECT seq FROM sqlite_sequence WHERE name = 'batches'"
            found = self._connection.execute(find).fetchone()
            self._last_batch_id = int(found[0]) if found else 0
        self._last_batch_id += 1
        return self._last_batch_id

    def _look(self, batch: RecordsIn, run: str, piece: _Good, noticed: Noticed) -> None:
        """What is more than text: numbers go to their rows, notable events to the alerts."""
        records = piece.records
        try:
            chosen = [record for record in records if record.get("event") in _LOOKED_AT]
        except TypeError:  # an event that is a list or an object
            events = ((record.get("event"), record) for record in records)
            chosen = [record for event, record in events if isinstance(event, str) and event in _LOOKED_AT]
        for record in chosen:
            if record["event"] == "metrics":
                if reason := self._add_metrics(batch, record):
                    noticed.add(piece.sequences, records, record, reason)
            else:
                self.notable.append((run, record))

    def _add_metrics(self, batch: RecordsIn, record: Record) -> str:
        """What is wrong with it, for its sender. Empty: nothing."""
        try:
            part = read_part(record)
        except (ValueError, TypeError, ArithmeticError) as error:  # whatever stands in it: never the batch's end
            self._counts.bad_metrics(batch.producer, str(error))
            return f"fits no row, a log line only: {error}"
        if part.bad_values:
            self._counts.values_skipped(batch.producer, part.bad_values)
        self._rows.add(part, producer=batch.producer, incarnation=batch.incarnation)
        return left_out(part.bad_values) if part.bad_values else ""

    def _producer(self, name: str, incarnation: int) -> _Producer:
        producer = self._producers.get((name, incarnation))
        if producer is None:
            find = "SELECT id, through_sequence FROM producers WHERE producer = ? AND incarnation = ?"
            found = self._connection.execute(find, (name, incarnation)).fetchone()
            if found is None:
                insert = "INSERT INTO producers (producer, incarnation, through_sequence) VALUES (?, ?, 0)"
                found = (self._connection.execute(insert, (name, incarnation)).lastrowid, 0)
            if len(self._producers) > 10_000:
                self._producers.clear()
            producer = self._producers[name, incarnation] = _Producer(*found)
        return producer


def put_mark(connection: sqlite3.Connection, name: str, body: bytes | None) -> None:
    """Keep a small state by name, within the caller's transaction. None: forget it."""
    if body is None:
        connection.execute("DELETE FROM marks WHERE name = ?", (name,))
    else:
        connection.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", (name, body))


def _parse(body: bytes) -> tuple[Record, bytes]:
    """The record, and its one line. Raises ValueError saying why it is no record."""
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(f"a record has at most {MAX_RECORD_BYTES} bytes, got {len(body)}")
    try:
        record = orjson.loads(body)
    except ValueError:
        return read_object(body)
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object, got {type(record).__name__}")
    return record, body.replace(b"\n", b" ") if b"\n" in body else body  # in JSON a newline is space


def _by_run(good: _Good) -> list[tuple[str, _Good]]:
    try:
        runs = {record.get("run") for record in good.records}
    except TypeError:  # a run that is a list or an object
        runs = set()
    if len(runs) == 1:
        return [(_name_of(runs.pop()), good)]
    parts: dict[str, _Good] = {}
    for sequence, body, record in zip(good.sequences, good.bodies, good.records, strict=True):
        part = parts.setdefault(_name_of(record.get("run")), _Good([], [], []))
        part.sequences.append(sequence)  # type: ignore[attr-defined]
        part.bodies.append(body)  # type: ignore[attr-defined]
        part.records.append(record)  # type: ignore[attr-defined]
    return list(parts.items())


def _name_of(run: object) -> str:
    return run if isinstance(run, str) else ""


def _pieces(bodies: tuple[bytes, ...]) -> Iterator[tuple[bytes, ...]]:
    """As large as a stored batch may be."""
    sizes = list(map(len, bodies))
    if len(sizes) <= MAX_BATCH_RECORDS and sum(sizes) <= MAX_BATCH_BYTES:
        if bodies:
            yield bodies
        return
    begin, size = 0, 0
    for at, more in enumerate(sizes):
        if at > begin and (at - begin >= MAX_BATCH_RECORDS or size + more > MAX_BATCH_BYTES):
            yield bodies[begin:at]
            begin, size = at, 0
        size += more
    yield bodies[begin:]


def _top_level(records: Sequence[Record]) -> int:
    """What a search by level goes by: as it reads a level, so this must."""
    try:
        return max(map(level_number, {record.get("level") for record in records}))
    except TypeError:  # a level that is a list or an object
        return max(level_number(record.get("level")) for record in records)
