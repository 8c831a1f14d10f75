"""One process that we started: its output file, its end, and the last things it said.

Never lets a child wait for us: output goes to a file straight away, or through a pipe that a thread always drains.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil

from furlong.launch.plan import ChildPlan
from furlong.process import ExitCode

PIPE_BYTES = 1024 * 1024
MAX_LINE_BYTES = 64 * 1024
TAIL_BYTES = 64 * 1024


class Child:
    """A started process, leader of a session of its own."""

    def __init__(self, plan: ChildPlan, *, output_path: Path, show_line: Callable[[str], None]) -> None:
        """Start it. Main thread only: the kernel ties its leash to the thread that starts it. Raises OSError."""
        self.plan = plan
        self.output_path = output_path
        self.started = time.monotonic()
        self.ended: float | None = None
        output_path.parent.mkdir(parents=True, exist_ok=True)
        self._output = open(output_path, "ab", buffering=0)  # noqa: SIM115 - kept for the child's life
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk
            self._output.write(f"--- {plan.instance} started {now}\n".encode())  # tells one start from the next
        self._begin = self._output.tell()
        self._process = subprocess.Popen(
            plan.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if plan.relayed else self._output,
            stderr=self._output,
            env=dict(plan.environment),
            start_new_session=True,
        )
        self._relay = self._start_relay(show_line) if plan.relayed else None
        if not self._relay:
            self._output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """How it ended; negative: by that signal. None: it runs."""
        code = self._process.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still runs."""
        if self.exit_code() is None:
            self._process.send_signal(number)

    def is_suspended(self) -> bool:
        """Whether somebody has stopped it with SIGSTOP."""
        try:
            return self.exit_code() is None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def describe_end(self) -> str:
        """How it ended, in words."""
        code = self.exit_code()
        if code is None:
            return "still runs"
        if code < 0:
            hint = " (the kernel's, when memory runs out?)" if code == -signal.SIGKILL else ""
            return f"was ended by {signal.Signals(-code).name}{hint}"
        known = {int(item): item.name for item in ExitCode}
        return f"ended with exit code {code}" + (f" ({known[code]})" if code in known else "")

    def last_lines(self, count: int) -> list[str]:
        """The last non-empty lines that it wrote, of this start only."""
        self.finish_relay(timeout_s=2.0)
        try:
            with open(self.output_path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._begin, end - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:  # somebody removed the run directory, for example
            return [f"(its output cannot be read: {error})"]
        return [line for line in text.splitlines() if line.strip()][-count:]

    def finish_relay(self, *, timeout_s: float) -> None:
        """After the child's end: wait until its last line has been passed on."""
        if self._relay:
            self._relay.join(timeout_s)

    def _start_relay(self, show_line: Callable[[str], None]) -> threading.Thread:
        assert self._process.stdout
        enlarge_pipe(self._process.stdout.fileno())
        relay = threading.Thread(target=self._drain, args=(show_line,), name=f"relay-{self.plan.instance}", daemon=True)
        relay.start()
        return relay

    def _drain(self, show_line: Callable[[str], None]) -> None:
        """Pass stdout on, line by line, until the last writer has closed it."""
        assert self._process.stdout
        rest = b""
        while chunk := os.read(self._process.stdout.fileno(), 64 * 1024):
            try:
                self._output.write(chunk)
            except OSError:  # a full disk must not stop the drain: the child would wait for us
                pass
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                show_line(line.decode(errors="replace"))
        if rest:
            show_line(rest.decode(errors="replace"))
        self._process.stdout.close()
        self._output.close()


def enlarge_pipe(descriptor: int) -> None:
    """Room for a few thousand rows while we are stopped (Ctrl-Z). Not every kernel grants it."""
    if sys.platform == "linux":
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            return
