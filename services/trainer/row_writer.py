"""Writes rows to stdout from a thread of its own: a closed or unread stdout costs rows, never training time.

Rows that nobody took are counted, and told: beside the rows once somebody reads again, and in the log.
"""

import os
import queue
import select
import sys
import threading
import time

import structlog

log = structlog.get_logger()

QUEUE_ROWS = 256
_POLL_MS = 1_000


class RowWriter:
    """A bounded queue in front of a file descriptor."""

    def __init__(self, descriptor: int | None = None, *, as_json: bool = False) -> None:
        """descriptor: None is this process's stdout. as_json: what it says of itself is JSON too."""
        self.num_dropped = 0
        """Rows that were not written: the queue was full, or the descriptor closed."""
        self._descriptor = _standard_output() if descriptor is None else descriptor
        self._as_json = as_json
        self._num_told = 0
        self._torn = False
        self._warned = False
        self._rows: queue.Queue[bytes | None] = queue.Queue(maxsize=QUEUE_ROWS)
        self._thread = threading.Thread(target=self._run, name="row-writer", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Queue a text with a newline. Never blocks, never raises."""
        try:
            self._rows.put_nowait(f"{text}\n".encode(errors="replace"))
        except queue.Full:
            self._drop()

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most timeout_s seconds, and report what was dropped."""
        deadline = time.monotonic() + timeout_s
        try:
            self._rows.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():  # what waits, and the row under way, will not be seen
            self.num_dropped += self._rows.qsize()
        if self.num_dropped:
            log.warning("rows_dropped", num_rows=self.num_dropped)

    def _run(self) -> None:
        while (row := self._rows.get()) is not None:
            missed = self.num_dropped - self._num_told
            notice = self._notice(missed) if missed else b""
            if self._write(notice + row):
                self._num_told += missed
            else:
                self._drop()

    def _notice(self, num_rows: int) -> bytes:
        if self._as_json:
            return b'{"event":"rows_dropped","num_rows":%d}\n' % num_rows
        return b"[trainer] %d rows were not shown here: nobody took them\n" % num_rows

    def _drop(self) -> None:
        self.num_dropped += 1
        if not self._warned:  # how many there were is told at the end
            self._warned = True
            log.warning("rows_not_taken", consequence="rows are dropped while nobody reads stdout; training goes on")

    def _write(self, content: bytes) -> bool:
        """Whether all of it was taken. A row that was cut is ended before the next begins."""
        if self._descriptor is None:
            return False
        if self._torn:
            content = b"\n" + content
        begun = len(content)
        try:
            while content:
                try:
                    content = content[os.write(self._descriptor, content) :]
                except BlockingIOError:  # somebody made it non-blocking
                    _wait_writable(self._descriptor)
        except OSError:  # nobody reads any more, or the disk is full
            self._torn = self._torn or len(content) < begun
            return False
        self._torn = False
        return True


def _standard_output() -> int | None:
    """None: it was closed before this process began, and its number may be another file's by now."""
    return 1 if sys.__stdout__ is not None else None


def _wait_writable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll(_POLL_MS)
