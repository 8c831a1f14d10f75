"""What to do with a damaged store: notice it, set it aside under another name, copy over what can be read.

Nothing damaged is ever deleted, and what was lost is counted. What rows lost is made again from the records
(rebuild.py). After a loss no id is given twice: sinks remember ids.
"""

import shutil
import sqlite3
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.metrics.migration import create_old, migrate
from services.metrics.rebuild import rebuild
from services.metrics.schema import create, pragma

CHECKED_WHOLE_BYTES = 8 * 1024 * 1024
"""A larger file is not read as a whole before the service serves."""
ID_GAP = 1_000_000
"""Ids that are left out after a loss: sinks may have seen rows that are no longer there."""
_TABLES = (
    *("runs", "producers", "batches", "records", "steps", "contributions", "rows"),
    *("cursors", "sinks", "alerts", "marks"),
)
_BACKWARDS = {
    "contributions": "step_id DESC, part DESC, producer DESC",
}
_LOG_HEADER, _FRAME_HEADER = struct.Struct(">IIIIIIII"), struct.Struct(">IIIIII")


@dataclass(frozen=True)
class Salvage:
    """What became of a damaged store."""

    reason: str
    set_aside: Path
    num_rescued: int
    """Records that could be read and were copied."""
    complete_tables: tuple[str, ...]
    num_lost_commits: int = 0
    """Commits in the write-ahead log that were acknowledged and cannot be read."""
    num_rebuilt_rows: int = 0


@dataclass(frozen=True)
class LogFrames:
    """The write-ahead log as it was found."""

    path: Path
    commits: tuple[int, ...]
    """Numbers of the frames that end a commit, of the log's newest generation."""


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file is damaged. A full, read-only or failing disk is another thing: the file may be well."""
    return type(error) is sqlite3.DatabaseError or "malformed" in str(error)  # its subclasses mean other things


def readable_text(text: bytes) -> str:
    """Of a name whose bytes have gone bad too: to read it must not be an error."""
    return text.decode("utf-8", "replace")


def look_at_log(path: Path) -> LogFrames:
    """Before the store is opened: which commits its write-ahead log says to hold.

    A frame without its page is one that was being written at a kill: never acknowledged. Half a page is not.
    """
    log = path.with_name(path.name + "-wal")
    commits = []
    try:
        size = log.stat().st_size
        with log.open("rb") as file:
            header = file.read(_LOG_HEADER.size)
            if len(header) < _LOG_HEADER.size:
                return LogFrames(log, ())
            _, _, page_size, _, salt, salt_2, _, _ = _LOG_HEADER.unpack(header)
            number = 0
            while len(frame := file.read(_FRAME_HEADER.size)) == _FRAME_HEADER.size and file.tell() < size:
                number += 1
                _, commit, one, two, _, _ = _FRAME_HEADER.unpack(frame)
                if (one, two) == (salt, salt_2) and commit:
                    commits.append(number)
                file.seek(page_size, 1)
    except OSError:
        return LogFrames(log, ())
    return LogFrames(log, tuple(commits))


def check_log(connection: sqlite3.Connection, path: Path, before: LogFrames) -> Salvage | None:
    """After it was opened, before the first write: whether commits that the log held could not be read.

    A commit that was being written when the service was killed has no end, and was never acknowledged.
    """
    if not before.commits:
        return None
    _, num_valid, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    lost = [number for number in before.commits if number > num_valid]
    if not lost:
        return None
    aside = free_name(path.with_name(path.name + "-wal"))
    shutil.copyfile(before.path, aside)
    leave_ids_out(connection)
    num_records = connection.execute("SELECT coalesce(sum(num_records), 0) FROM batches").fetchone()[0]
    reason = f"the write-ahead log cannot be read beyond frame {num_valid} of {before.commits[-1]}"
    return Salvage(reason, aside, num_records, (), num_lost_commits=len(lost))


def check_quickly(connection: sqlite3.Connection, path: Path) -> None:
    """What can be checked of a file of any size at a start: its length, every table's root, the newest records.

    Raises sqlite3.DatabaseError. The whole is checked while the service runs (`check_whole`).
    """
    pages, size = pragma(connection, "page_count"), pragma(connection, "page_size")
    log = path.with_name(path.name + "-wal")
    in_log = log.exists() and log.stat().st_size > 0
    if not in_log and path.stat().st_size < pages * size:
        raise sqlite3.DatabaseError(f"the file has {path.stat().st_size} bytes, its header says {pages * size}")
    if pages * size <= CHECKED_WHOLE_BYTES:
        check_whole(connection)
        return
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()  # the names are ours
    for table in {"batches", "records", "rows"} & set(tables):
        connection.execute(f"SELECT id, length(body) FROM {table} ORDER BY id DESC LIMIT 64").fetchall()


def check_whole(connection: sqlite3.Connection) -> None:
    """Every page and index entry. Raises sqlite3.DatabaseError saying what is wrong first."""
    verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)


def set_aside(path: Path) -> Path:
    """Rename the store and what belongs to it. Raises OSError."""
    aside = free_name(path)
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def free_name(path: Path) -> Path:
    """A name for what was found at path, that nothing has."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    number = 0
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    return aside


def leave_ids_out(connection: sqlite3.Connection) -> None:
    """Have the next rows, batches and alerts begin far behind all that ever had an id."""
    connection.execute("BEGIN IMMEDIATE")
    for table in ("rows", "batches", "alerts"):
        connection.execute(
            "INSERT INTO sqlite_sequence SELECT ?, 0 WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = ?)",
            (table, table),
        )
    connection.execute("UPDATE sqlite_sequence SET seq = seq + ?", (ID_GAP,))
    connection.execute("COMMIT")


def rescue(damaged: Path, into: sqlite3.Connection) -> dict[str, Any]:
    """Copy what can be read, table by table, around the damage; make again what rows lost. What Salvage says of it.

    Any: the fields of Salvage.
    """
    source = _open_damaged(damaged)
    version = _version(source)
    (create_old if version == 1 else create)(into)
    complete = []
    into.execute("BEGIN IMMEDIATE")
    if source is not None:
        complete = [table for table in _TABLES if _copy_table(source, into, table)]
        source.close()
    into.execute("COMMIT")
    if version == 1:
        migrate(into)
    leave_ids_out(into)
    into.execute("BEGIN IMMEDIATE")
    removed = into.execute("SELECT count(*) FROM totals WHERE name = 'records_removed' AND value > 0").fetchone()[0]
    num_rows = rebuild(into, all_batches="batches" in complete and not removed)
    into.execute("COMMIT")
    num_records = into.execute("SELECT value FROM totals WHERE name = 'records_stored'").fetchone()[0]
    return {"num_rescued": num_records, "complete_tables": tuple(complete), "num_rebuilt_rows": num_rows}


def _open_damaged(aside: Path) -> sqlite3.Connection | None:
    has_log = aside.with_name(aside.name + "-wal").exists()
    options = "mode=ro" if has_log else "mode=ro&immutable=1"  # immutable: leaves no new files beside it
    try:
        source = sqlite3.connect(f"file:{aside}?{options}", uri=True, isolation_level=None)
    except sqlite3.Error:
        return None
    source.text_factory = readable_text
    return source


def _version(source: sqlite3.Connection | None) -> int:
    try:
        return int(source.execute("PRAGMA user_version").fetchone()[0]) if source is not None else 0
    except sqlite3.Error:
        return 0


def _copy_table(source: sqlite3.Connection, into: sqlite3.Connection, table: str) -> bool:
    """Whether all of it could be read. Around a damaged page, what is beyond it is read too."""
    try:
        known = into.execute(f"SELECT * FROM {table} LIMIT 0").description  # the names are ours
    except sqlite3.OperationalError:
        return True  # a table of the other schema
    marks = ",".join("?" * len(known))
    insert = f"INSERT OR IGNORE INTO {table} VALUES ({marks})"
    try:
        all_fit = True
        for row in source.execute(f"SELECT * FROM {table}"):
            all_fit = _put(into, insert, row) and all_fit
        return all_fit
    except sqlite3.Error:
        pass
    try:  # from the other end, until the same damage
        for row in source.execute(f"SELECT * FROM {table} ORDER BY {_BACKWARDS.get(table, 'rowid DESC')}"):
            _put(into, insert, row)
    except sqlite3.Error:
        return False
    return False


def _put(into: sqlite3.Connection, insert: str, row: tuple[object, ...]) -> bool:
    """Whether it fits the table; what stands on a damaged page need not."""
    try:
        into.execute(insert, row)
    except sqlite3.IntegrityError:
        return False
    return True
