"""The rows as lines of a file, each exactly once, also when the service is killed between writing and remembering.

The cursor names the row and the byte after it. At a start the file's tail is compared with the rows that follow: lines
that are there already are not written again, a torn one is completed.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from services.metrics.rows import Row, RowReader
from services.metrics.sinks.sink import Cursor, Sink, SinkContext, option_of

log = structlog.get_logger()


def make(options: Mapping[str, object], context: SinkContext) -> "JsonlSink":
    """Options: `path`, the file; metrics.jsonl in the run directory when it is not given."""
    given = option_of(options, context, "path", str, str(context.run_dir.metrics_rows))
    path = context.path("path", given)
    if context.live and path.suffix != ".jsonl":
        raise context.refuse("path", given, "must end in .jsonl", "A flag may name any file.")
    if path.is_dir() or not path.parent.is_dir():
        raise context.refuse("path", given, "must be a file in a folder that is there")
    return JsonlSink(path, context.reader)


class JsonlSink(Sink[Row]):
    """Appends to one file; no other process may."""

    name = "jsonl"
    gather_s = 0.0

    def __init__(self, path: Path, reader: RowReader) -> None:
        self._path, self._reader = path, reader
        self._handle: int | None = None
        self._position = 0

    async def start(self, durable: Cursor) -> Cursor:
        """Open the file and find out what is in it."""
        return await asyncio.to_thread(self._open, durable)

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Append the rows and have the disk take them."""
        return await asyncio.to_thread(self._append, rows)

    async def finish(self) -> None:
        """Every row is on the disk already."""
        await self.abort()

    async def abort(self) -> None:
        """Close the file."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _open(self, durable: Cursor) -> Cursor:
        handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _own(handle)
        size = os.fstat(handle).st_size
        if size < durable.position:
            os.close(handle)
            self._set_aside(size, durable)
            return self._open(Cursor(0, 0))
        self._handle = handle
        row_id = self._reconcile(handle, durable, size)
        self._position = os.fstat(handle).st_size
        return Cursor(row_id, self._position)

    def _set_aside(self, size: int, durable: Cursor) -> None:
        """Somebody cut or removed the file: write it anew from the durable log, without rows that retention removed."""
        found = self._reader.query("SELECT count(*) FROM rows WHERE id <= ?", (durable.row_id,))
        num_gone = durable.row_id - int(found[0][0])
        log.warning("metrics_file_rewritten", found_bytes=size, expected_bytes=durable.position, num_rows_gone=num_gone)
        if size:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            self._path.rename(self._path.with_name(f"{self._path.name}.cut-{stamp}-{time.time_ns() % 1000}"))

    def _reconcile(self, handle: int, durable: Cursor, size: int) -> int:
        """Compare what stands beyond the cursor with the rows that follow it; the last row that is in the file."""
        position, row_id = durable.position, durable.row_id
        while position < size:
            rows = self._reader.after(row_id, 1)
            line = rows[0].body + b"\n" if rows else b""
            found = os.pread(handle, len(line), position)
            torn = position + len(found) == size and bool(line) and line.startswith(found)
            if found != line and torn:
                _write_all(handle, line[len(found) :])
            elif found != line or not line:  # not ours: leave it, on lines of its own
                log.warning("metrics_file_has_foreign_lines", size_bytes=size - position)
                if os.pread(handle, 1, size - 1) != b"\n":
                    _write_all(handle, b"\n")
                break
            position += len(line)
            row_id = rows[0].row_id
        return row_id

    def _append(self, rows: Sequence[Row]) -> Cursor:
        if self._handle is None:
            raise OSError("the file is closed")
        content = b"".join(row.body + b"\n" for row in rows)
        _write_all(self._handle, content)
        os.fdatasync(self._handle)
        self._position += len(content)
        return Cursor(rows[-1].row_id, self._position)


def _own(handle: int) -> None:
    """Raises OSError when another sink writes the same file: each would take the other's lines for foreign ones."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise OSError("another writes the same file; give each sink a file of its own") from error
    except OSError:  # a disk without locks
        return


def _write_all(handle: int, content: bytes) -> None:
    """Raises OSError when the disk takes only a part; `start` then completes the line."""
    written = os.write(handle, content)
    while written < len(content):
        written += os.write(handle, content[written:])
