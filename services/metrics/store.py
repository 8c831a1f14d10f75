"""The durable log: SQLite in WAL mode, synchronous=FULL. Owns the schema, opening, damage and salvage.

A damaged file is set aside under another name, what can be read of it is copied over, and both are reported. It is
never deleted. A file of a newer schema is refused.
"""

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x4655524C  # "FURL"

_SCHEMA = """
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
_TABLES = ("producers", "records", "steps", "contributions", "rows", "cursors")


class NewerSchema(Exception):
    """The file was written by a later Furlong."""


@dataclass(frozen=True)
class Salvage:
    """What became of a damaged file."""

    reason: str
    set_aside: Path
    num_rescued: int
    """Records that could be read and were copied."""
    complete_tables: tuple[str, ...]


@dataclass(frozen=True)
class Opened:
    """The store, ready to write."""

    connection: sqlite3.Connection
    salvage: Salvage | None


def open_store(path: Path) -> Opened:
    """Open or make the store. The connection may be used by one thread at a time. Raises NewerSchema, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return Opened(_open(path), None)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and not _is_damage(error):
            raise OSError(f"cannot open {path}: {error}") from error
        reason = str(error)
    aside = _set_aside(path)
    connection = _open(path)
    num_rescued, complete = _rescue(aside, connection)
    return Opened(connection, Salvage(reason, aside, num_rescued, complete))


def open_reader(path: Path) -> sqlite3.Connection:
    """A second connection that only reads."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA busy_timeout = 5000")
    return connection


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        connection.execute("PRAGMA busy_timeout = 5000")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        _check(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    application, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    has_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not has_tables:
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";\n"):
            if statement.strip():
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
        return
    if application != _APPLICATION_ID:
        raise sqlite3.DatabaseError("it is not a metrics store")
    if version > SCHEMA_VERSION:
        raise NewerSchema(
            f"{path} has schema {version}; this version of Furlong knows {SCHEMA_VERSION}. "
            "Use the version that wrote it, or another run directory."
        )
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _is_damage(error: sqlite3.OperationalError) -> bool:
    return "disk I/O error" in str(error) or "malformed" in str(error)


def _set_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    number = 0
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def _rescue(aside: Path, into: sqlite3.Connection) -> tuple[int, tuple[str, ...]]:
    """Copy what can be read, table by table, until the damage. Cursors never point beyond the rows that are left."""
    complete = []
    has_log = aside.with_name(aside.name + "-wal").exists()
    options = "mode=ro" if has_log else "mode=ro&immutable=1"  # immutable: leaves no new files beside it
    try:
        source = sqlite3.connect(f"file:{aside}?{options}", uri=True, isolation_level=None)
    except sqlite3.Error:
        return 0, ()
    into.execute("BEGIN IMMEDIATE")
    for table in _TABLES:
        if _copy_table(source, into, table):
            complete.append(table)
    into.execute("UPDATE cursors SET row_id = min(row_id, (SELECT coalesce(max(id), 0) FROM rows))")
    into.execute("DELETE FROM contributions WHERE step_id NOT IN (SELECT id FROM steps)")
    into.execute("UPDATE steps SET last_row_id = NULL WHERE last_row_id NOT IN (SELECT id FROM rows)")
    into.execute("COMMIT")
    source.close()
    return into.execute("SELECT count(*) FROM records").fetchone()[0], tuple(complete)


def _copy_table(source: sqlite3.Connection, into: sqlite3.Connection, table: str) -> bool:
    try:
        cursor = source.execute(f"SELECT * FROM {table}")  # the names are ours
        marks = ",".join("?" * len(cursor.description))
        for row in cursor:
            into.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)
    except sqlite3.Error:
        return False
    return True
