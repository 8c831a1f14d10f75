"""What `furlong up` shows. Never blocks and never raises, whatever the terminal does.

A line goes on a bounded queue; one thread writes. When the reader is stuck, lines beyond the bound are dropped and
counted; when it is gone, all are. The run goes on in both cases.
"""

import os
import select
import sys
import threading
import time
from collections import deque

MAX_LINES = 5_000
_POLL_MS = 1_000


class Console:
    """Lines on their way to one file descriptor."""

    def __init__(self, descriptor: int, *, max_lines: int = MAX_LINES) -> None:
        self.num_dropped = 0
        """Lines that were not shown, since the reader was stuck or gone."""
        self._descriptor = descriptor
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._change = threading.Condition()
        self._gone = _was_closed_from_the_start(descriptor)
        self._writing = False
        threading.Thread(target=self._write_lines, name=f"console-{descriptor}", daemon=True).start()

    def line(self, text: str) -> None:
        """Show one line, or several joined by newlines; any thread."""
        with self._change:
            if self._gone or len(self._lines) >= self._max_lines:
                self.num_dropped += 1
                return
            self._lines.append(text)
            self._change.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything so far is written, within a limit; whether it was."""
        deadline = time.monotonic() + timeout_s
        with self._change:
            while self._lines or self._writing:
                if not self._change.wait(deadline - time.monotonic()):
                    return False
            return not self._gone

    def _write_lines(self) -> None:
        told = 0
        while True:
            with self._change:
                self._writing = False
                self._change.notify_all()
                while not self._lines:
                    self._change.wait()
                text = self._lines.popleft() + "\n"
                self._writing = True
                missed, told = self.num_dropped - told, self.num_dropped
            if missed and not self._gone:
                text += f"[up] {missed} lines were not shown here: nobody took them. They are in the logs.\n"
            self._write(text.encode(errors="replace"))

    def _write(self, content: bytes) -> None:
        try:
            while content and not self._gone:
                try:
                    content = content[os.write(self._descriptor, content) :]
                except BlockingIOError:  # a non-blocking terminal that is full; the bound of the lines holds meanwhile
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll(_POLL_MS)
        except OSError:  # closed pipe, closed terminal: there is nobody to show anything to
            with self._change:
                self._gone = True
                self.num_dropped += 1 + len(self._lines)
                self._lines.clear()


def _was_closed_from_the_start(descriptor: int) -> bool:
    """Then the number of stdout or stderr is free for the next file that is opened, which must get no lines."""
    return {1: sys.__stdout__, 2: sys.__stderr__}.get(descriptor, sys) is None
