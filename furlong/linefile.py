"""Where lines are written: a file that is appended to, or stderr. A write never raises and never waits for a reader.

One write a line, so that lines of several writers do not mix. What could not be written is counted, and the next line
starts on a line of its own.
"""

import contextlib
import os
import select
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

_TORN_TRIES = 5
_PIPE_CHUNK_BYTES = 4096  # PIPE_BUF: a pipe that polls writable takes this much without waiting


class LineFile(Protocol):
    """Takes whole lines."""

    def write_line(self, line: bytes) -> None:
        """Write the line and a newline."""

    def close(self) -> None:
        """Write no more."""


class AppendedFile:
    """A regular file, opened O_APPEND. Holds no lock: each line is one write."""

    def __init__(self, handle: int, *, torn: bool) -> None:
        self._handle = handle
        self._torn = torn
        self.was_torn = torn
        """Whether the last line that was there had no end: whoever wrote it was killed in it."""
        self.num_lost = 0

    def write_line(self, line: bytes) -> None:
        content = line + b"\n"
        if self._torn:
            content = b"\n" + content
        try:
            written = os.write(self._handle, content)
        except OSError:  # a full disk, or closed
            self.num_lost += 1
            return
        self._torn = written < len(content)
        self.num_lost += self._torn

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class Console:
    """stderr: a terminal, a pipe or a file. A pipe that nobody reads loses lines, it does not stop the caller."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lock = threading.RLock()
        self._torn = False
        self._waits = _may_wait(handle)
        self.num_lost = 0
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # another thread may have held it

    def write_line(self, line: bytes) -> None:
        with self._lock:
            content = (b"\n" if self._torn else b"") + line + b"\n"
            sent = 0
            with contextlib.suppress(OSError, ValueError):  # closed
                while sent < len(content) and self._can_write():
                    end = sent + _PIPE_CHUNK_BYTES if self._waits else len(content)
                    sent += os.write(self._handle, content[sent:end])
            self.num_lost += sent < len(content)
            self._torn = self._torn if sent == 0 else sent < len(content)

    def close(self) -> None:
        """stderr stays open: it is not ours."""

    def _can_write(self) -> bool:
        if not self._waits:
            return True
        poll = select.poll()
        poll.register(self._handle, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poll.poll(0))


def open_appending(path: Path) -> AppendedFile:
    """Open, or make, a file to append lines to. A last line without a newline (a crash) gets one with the next line.

    Raises OSError when the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    return AppendedFile(handle, torn=_ends_torn(handle))


def _ends_torn(handle: int) -> bool:
    """Whether the last line has no end, and is not just being written by another process."""
    for _ in range(_TORN_TRIES):
        size = os.fstat(handle).st_size
        if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
            return False
        time.sleep(0.01)
    return True


def standard_error() -> Console:
    """This process's stderr. When it was closed from the start nothing is written: its number may be another file's."""
    return Console(2 if sys.__stderr__ is not None else -1)


def _may_wait(handle: int) -> bool:
    """Whether a write there can wait for a reader: anything but a regular file."""
    try:
        return not stat.S_ISREG(os.fstat(handle).st_mode)
    except OSError:
        return False
