"""Writes rows to stdout from a thread of its own: a closed or unread stdout costs rows, never training time."""

import os
import queue
import threading
import time

import structlog

log = structlog.get_logger()

QUEUE_ROWS = 256


class RowWriter:
    """A bounded queue in front of a file descriptor."""

    def __init__(self, descriptor: int = 1) -> None:
        self.num_dropped = 0
        """Rows that were not written: the queue was full, or the descriptor closed."""
        self._descriptor = descriptor
        self._rows: queue.Queue[bytes | None] = queue.Queue(maxsize=QUEUE_ROWS)
        self._thread = threading.Thread(target=self._run, name="row-writer", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Queue a text with a newline. Never blocks, never raises."""
        try:
            self._rows.put_nowait(f"{text}\n".encode(errors="replace"))
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most timeout_s seconds, and report what was dropped."""
        deadline = time.monotonic() + timeout_s
        try:
            self._rows.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            self.num_dropped += self._rows.qsize()
        if self.num_dropped:
            log.warning("rows_dropped", num_rows=self.num_dropped)

    def _run(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                while row:
                    row = row[os.write(self._descriptor, row) :]
            except OSError:  # nobody reads any more
                self.num_dropped += 1
