"""The tables of the durable log. Owns their definition; what a change of it means for older files is migration.py's."""

import sqlite3

SCHEMA_VERSION = 2
APPLICATION_ID = 0x4655524C  # "FURL"

# batches: what one producer sent of one run, at most 4,096 records joined by newlines. first_sequence is that of its
# first record; those of other runs and refused ones leave gaps. The id of record n is (batch id << 16) + n.
# attempts: the first step that an attempt came to; older attempts' rows from there on are no longer current.
# points: the numbers of the rows once more, by key. A value that is NULL is NaN; infinities are REAL's own.
SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, first_us INTEGER NOT NULL, last_us INTEGER NOT NULL
);
CREATE TABLE producers (
    id INTEGER PRIMARY KEY, producer TEXT NOT NULL, incarnation INTEGER NOT NULL, through_sequence INTEGER NOT NULL,
    UNIQUE (producer, incarnation)
);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id INTEGER NOT NULL, producer_id INTEGER NOT NULL,
    first_sequence INTEGER NOT NULL, num_records INTEGER NOT NULL, received_us INTEGER NOT NULL,
    top_level INTEGER NOT NULL, crc INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX batches_by_run ON batches (run_id, id);
CREATE TABLE steps (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, axis TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
    rollout_id INTEGER, expected BLOB NOT NULL, opened_us INTEGER NOT NULL, last_row_id INTEGER,
    UNIQUE (run, axis, attempt, step)
);
CREATE INDEX steps_waiting ON steps (id) WHERE last_row_id IS NULL;
CREATE INDEX steps_by_axis ON steps (axis, step);
CREATE INDEX steps_by_run ON steps (run, axis, step);
CREATE TABLE attempts (
    run TEXT NOT NULL, axis TEXT NOT NULL, attempt INTEGER NOT NULL, first_step INTEGER NOT NULL,
    PRIMARY KEY (run, axis, attempt)
) WITHOUT ROWID;
CREATE TABLE contributions (
    step_id INTEGER NOT NULL, part TEXT NOT NULL, producer TEXT NOT NULL, incarnation INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (step_id, part, producer)
) WITHOUT ROWID;
CREATE TABLE rows (
    id INTEGER PRIMARY KEY AUTOINCREMENT, step_id INTEGER NOT NULL, run_id INTEGER NOT NULL, prior_id INTEGER,
    emitted_us INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX rows_by_run ON rows (run_id, id);
CREATE TABLE series (
    id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL, axis TEXT NOT NULL, key TEXT NOT NULL, UNIQUE (run_id, axis, key)
);
CREATE TABLE points (
    series_id INTEGER NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL, value REAL,
    PRIMARY KEY (series_id, step, attempt)
) WITHOUT ROWID;
CREATE TABLE cursors (
    sink TEXT PRIMARY KEY, row_id INTEGER NOT NULL, position INTEGER NOT NULL
);
CREATE TABLE sinks (
    name TEXT PRIMARY KEY, kind TEXT NOT NULL, options TEXT NOT NULL
);
CREATE TABLE alerts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id INTEGER NOT NULL, rule TEXT NOT NULL, state TEXT NOT NULL,
    at_us INTEGER NOT NULL, body TEXT NOT NULL
);
CREATE INDEX alerts_by_run ON alerts (run_id, id);
CREATE TABLE marks (
    name TEXT PRIMARY KEY, body BLOB NOT NULL
);
CREATE TABLE totals (
    name TEXT PRIMARY KEY, value INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO totals VALUES ('records_stored', 0), ('records_removed', 0);
"""


def create(connection: sqlite3.Connection) -> None:
    """All tables, in a file that has none, as one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    create_tables(connection, SCHEMA, SCHEMA_VERSION)
    connection.execute("COMMIT")


def create_tables(connection: sqlite3.Connection, script: str, version: int) -> None:
    """The tables of a script, within the caller's transaction."""
    for statement in script.split(";\n"):
        if statement.strip():
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version}")


def pragma(connection: sqlite3.Connection, name: str) -> int:
    """The number that a pragma says."""
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
