"""Opens the durable log: SQLite in WAL mode, synchronous=FULL.

A file of an older schema is converted, one of a newer schema refused. A damaged file is set aside under another name
(salvage.py), never deleted. A disk that is full or cannot be written is no damage.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from services.metrics import salvage
from services.metrics.migration import migrate
from services.metrics.schema import APPLICATION_ID, SCHEMA_VERSION, create, pragma

PAGE_BYTES = 8192
"""Measured: records are written a tenth faster than with 4096; 16384 adds little and makes small commits large."""
WAL_PAGES = 2_000
"""A write-ahead log of so many pages (16 MB) is moved into the file."""
WAL_KEPT_BYTES = 64 * 1024 * 1024


class NewerSchema(Exception):
    """The file was written by a later Furlong."""


@dataclass(frozen=True)
class Opened:
    """The store, ready to write."""

    connection: sqlite3.Connection
    salvage: salvage.Salvage | None


def open_store(path: Path, *, damage: str = "") -> Opened:
    """Open or make the store. The connection may be used by one thread at a time. Raises NewerSchema, OSError.

    damage: what is known to be wrong with the file; it is then set aside whatever a look at it says.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".rescue")
    if _finish_rescue(path, scratch) or not damage:
        try:
            return _open_whole(path)
        except sqlite3.DatabaseError as error:
            if not salvage.is_damage(error):
                raise OSError(f"cannot open {path}: {error}") from error
            damage = str(error)
    try:
        return _rescue(path, scratch, damage)
    except sqlite3.Error as error:
        raise OSError(f"cannot make {path} anew: {error}") from error


def _finish_rescue(path: Path, scratch: Path) -> bool:
    """After a kill in the middle of one: the damaged file goes only when the new one is whole. Whether it was."""
    whole = _whole(path)
    is_whole = whole.exists()
    if is_whole:  # what is left of the damaged one may lack its log: it is not read again
        salvage.set_aside(path)
        whole.rename(path)
    for part in scratch.parent.glob(scratch.name + "*"):
        part.unlink()
    return is_whole


def _rescue(path: Path, scratch: Path, damage: str) -> Opened:
    connection = _connect(scratch)
    try:
        rescued = salvage.rescue(path, connection)
    finally:
        connection.close()
    scratch.rename(_whole(path))
    aside = salvage.set_aside(path)
    _whole(path).rename(path)
    return Opened(_connect(path), salvage.Salvage(damage, aside, **rescued))


def _whole(path: Path) -> Path:
    """The name of the new store while the damaged one is still being renamed."""
    return path.with_name(path.name + ".whole")


def open_reader(path: Path) -> sqlite3.Connection:
    """A second connection that only reads. Raises sqlite3.Error."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA busy_timeout = 5000")
    connection.execute("PRAGMA cache_size = -1024")
    connection.text_factory = salvage.readable_text
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    is_new = not path.exists() or not path.stat().st_size
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, cached_statements=256)
    connection.text_factory = salvage.readable_text
    try:
        connection.execute("PRAGMA busy_timeout = 5000")

        if is_new:  # it could not be changed later
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
        connection.execute("PRAGMA cache_size = -8192")
    except BaseException:
        connection.close()
        raise
    return connection


def _open_whole(path: Path) -> Opened:
    log_before = salvage.look_at_log(path)
    connection = _connect(path)
    try:
        _check(connection, path)
        lost = salvage.check_log(connection, path, log_before)
        if pragma(connection, "user_version") < SCHEMA_VERSION:
            migrate(connection)
        return Opened(connection, lost)
    except BaseException:
        connection.close()
        raise


def _check(connection: sqlite3.Connection, path: Path) -> None:
    application, version = pragma(connection, "application_id"), pragma(connection, "user_version")
    has_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not has_tables:
        create(connection)
        return
    if application != APPLICATION_ID:
        raise sqlite3.DatabaseError("it is not a metrics store")
    if version > SCHEMA_VERSION:
        raise NewerSchema(
            f"{path} has schema {version}; this version of Furlong knows {SCHEMA_VERSION}. "
            "Use the version that wrote it, or another run directory."
        )
    salvage.check_quickly(connection, path)
