"""From schema 1 to schema 2, in place and in one transaction: a kill in the middle leaves the file as it was.

Schema 1 had a row a record; schema 2 has a row a batch, and the numbers of the rows by key.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from itertools import groupby

import orjson

from services.metrics.points import fill_points
from services.metrics.schema import SCHEMA, SCHEMA_VERSION, create_tables

MAX_BATCH_RECORDS = 256
VACUUM_BELOW_BYTES = 1024 * 1024 * 1024
"""A larger file is not rewritten only to be able to shrink."""

SCHEMA_1 = """
CREATE TABLE producers (
    id INTEGER PRIMARY KEY, producer TEXT NOT NULL, incarnation INTEGER NOT NULL, through_sequence INTEGER NOT NULL,
    UNIQUE (producer, incarnation)
);
CREATE TABLE records (
    id INTEGER PRIMARY KEY, producer_id INTEGER NOT NULL, sequence INTEGER NOT NULL, received_us INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE TABLE steps (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, axis TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
    rollout_id INTEGER, expected BLOB NOT NULL, opened_us INTEGER NOT NULL, last_row_id INTEGER,
    UNIQUE (run, axis, attempt, step)
);
CREATE INDEX steps_waiting ON steps (id) WHERE last_row_id IS NULL;
CREATE INDEX steps_by_axis ON steps (axis, step);
CREATE TABLE contributions (
    step_id INTEGER NOT NULL, part TEXT NOT NULL, producer TEXT NOT NULL, incarnation INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (step_id, part, producer)
) WITHOUT ROWID;
CREATE TABLE rows (
    id INTEGER PRIMARY KEY AUTOINCREMENT, step_id INTEGER NOT NULL, prior_id INTEGER, body BLOB NOT NULL
);
CREATE TABLE cursors (
    sink TEXT PRIMARY KEY, row_id INTEGER NOT NULL, position INTEGER NOT NULL
);
"""
_KEPT_TABLES = ("producers", "steps", "contributions", "cursors")


def create_old(connection: sqlite3.Connection) -> None:
    """An empty file of schema 1, for what is rescued from one."""
    connection.execute("BEGIN IMMEDIATE")
    create_tables(connection, SCHEMA_1, 1)
    connection.execute("COMMIT")


def migrate(connection: sqlite3.Connection) -> None:
    """Convert the open file. Raises sqlite3.Error; then it is as before."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for index in ("steps_waiting", "steps_by_axis"):
            connection.execute(f"DROP INDEX IF EXISTS {index}")
        for table in (*_KEPT_TABLES, "records", "rows"):
            connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
        create_tables(connection, SCHEMA, SCHEMA_VERSION)
        for table in _KEPT_TABLES:
            connection.execute(f"INSERT INTO {table} SELECT * FROM old_{table}")
        _copy_records(connection)
        _copy_rows(connection)
        for table in (*_KEPT_TABLES, "records", "rows"):
            connection.execute(f"DROP TABLE old_{table}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    _let_shrink(connection)


def _let_shrink(connection: sqlite3.Connection) -> None:
    """A file of schema 1 could never give room back; rewritten once, it can. Where there is no room to, it stays."""
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    if pages * size > VACUUM_BELOW_BYTES:
        return
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("VACUUM")
    except sqlite3.OperationalError:  # a full disk: the file is as before
        return


def _copy_records(connection: sqlite3.Connection) -> None:
    found = connection.execute("SELECT producer_id, received_us, sequence, body FROM old_records ORDER BY id")
    runs: dict[str, int] = {}
    numbered: Iterator[tuple[int, int, int, bytes, str]] = ((*row, _run_of(row[3])) for row in found)
    for (producer_id, received_us, run), rows in groupby(numbered, key=lambda row: (row[0], row[1], row[4])):
        for chunk in _chunks(rows):
            run_id = _run_id(connection, runs, run, received_us)
            body = b"\n".join(one[3].replace(b"\n", b" ") for one in chunk)  # in JSON a newline is space
            connection.execute(
                "INSERT INTO batches (run_id, producer_id, first_sequence, num_records, received_us, top_level, crc,"
                " body) VALUES (?, ?, ?, ?, ?, 50, ?, ?)",
                (run_id, producer_id, chunk[0][2], len(chunk), received_us, zlib.crc32(body), body),
            )
    connection.execute(
        "UPDATE totals SET value = (SELECT coalesce(sum(num_records), 0) FROM batches) WHERE name = 'records_stored'"
    )


def _copy_rows(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT OR IGNORE INTO runs (name, first_us, last_us)"
        " SELECT run, min(opened_us), max(opened_us) FROM steps GROUP BY run"
    )
    connection.execute(
        "INSERT INTO rows (id, step_id, run_id, prior_id, emitted_us, body) SELECT r.id, r.step_id, n.id, r.prior_id,"
        " s.opened_us, r.body FROM old_rows r JOIN steps s ON s.id = r.step_id JOIN runs n ON n.name = s.run"
    )
    connection.execute(
        "INSERT INTO attempts SELECT run, axis, attempt, min(step) FROM steps GROUP BY run, axis, attempt"
    )
    fill_points(connection)


def _run_of(body: bytes) -> str:
    try:
        run = orjson.loads(body).get("run", "")
    except (ValueError, AttributeError):  # damaged since
        return ""
    return run if isinstance(run, str) else ""


def _run_id(connection: sqlite3.Connection, runs: dict[str, int], run: str, received_us: int) -> int:
    if run not in runs:
        insert = "INSERT INTO runs (name, first_us, last_us) VALUES (?, ?, ?)"
        runs[run] = connection.execute(insert, (run, received_us, received_us)).lastrowid or 0
    connection.execute("UPDATE runs SET last_us = max(last_us, ?) WHERE id = ?", (received_us, runs[run]))
    return runs[run]


def _chunks(rows: Iterable[tuple]) -> Iterator[list[tuple]]:  # type: ignore[type-arg]
    chunk: list[tuple] = []  # type: ignore[type-arg]
    size = 0
    for row in rows:
        if chunk and (len(chunk) >= MAX_BATCH_RECORDS or size + len(row[3]) > 4 * 1024 * 1024):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += len(row[3])
    if chunk:
        yield chunk
