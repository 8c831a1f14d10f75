"""One `furlong up` a run directory, and what it has started: `up.json`.

The kernel's file lock is what counts; it goes with its holder, however that ends. The file's text only says who it is.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import orjson
import psutil

from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.rundir import RunDir, write_atomically

TAKE_S = 0.5
"""Longer than `furlong status` looks at the lock."""


@dataclass(frozen=True)
class Started:
    """What the `furlong up` of a run directory has started."""

    pid: int
    """Of `furlong up` itself."""
    started: float
    """Seconds since the epoch."""
    children: Mapping[str, "StartedChild"]
    """By instance."""
    stopping: bool = False
    """Whether it is ending them."""


@dataclass(frozen=True)
class StartedChild:
    """One process, told apart from a later one of the same pid by its start time."""

    pid: int
    process_started: float
    """Seconds since the epoch, as the kernel tells it."""

    def alive(self) -> bool:
        """Whether it still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.process_started) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class RunLock:
    """Held as long as the run is supervised."""

    def __init__(self, run_dir: RunDir) -> None:
        """Take it. Raises ConfigError naming the process that has it."""
        self._run_dir = run_dir
        self._recorded: dict[str, object] = {}
        self._file: IO[str] = open(run_dir.root / ".up.lock", "a+")  # noqa: SIM115 - kept until released
        if not self._taken_within(TAKE_S):
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            rule = f"is in use by a running `furlong up` (pid {holder})"
            remedy = "Wait for it, stop it with Ctrl-C or `kill`, or give another --run-dir."
            raise ConfigError([Problem("run.run_dir", str(run_dir.root), rule, remedy)])
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def _taken_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)

    def record(self, children: Mapping[str, int]) -> None:
        """Write down what was started, for `furlong status`; also when one was started again. Raises OSError."""
        known = {name: [pid, _process_started(pid)] for name, pid in children.items()}
        self._recorded = {"pid": os.getpid(), "started": time.time(), **self._recorded, "children": known}
        self._write()

    def record_stopping(self) -> None:
        """Write down that what was started is being ended; that it cannot be written must not disturb the ending."""
        self._recorded["stopping"] = True
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        write_atomically(started_path(self._run_dir), orjson.dumps(self._recorded) + b"\n")

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_started(run_dir: RunDir) -> Started | None:
    """What the newest `furlong up` of this run directory started, which may have ended since."""
    try:
        tree = orjson.loads(started_path(run_dir).read_bytes())
        children = {name: StartedChild(int(pid), float(began)) for name, (pid, began) in tree["children"].items()}
        return Started(int(tree["pid"]), float(tree["started"]), children, bool(tree.get("stopping", False)))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _process_started(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def is_locked(run_dir: RunDir) -> bool:
    """Whether a `furlong up` supervises this run directory now."""
    try:
        with open(run_dir.root / ".up.lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


def started_path(run_dir: RunDir) -> Path:
    return run_dir.root / "up.json"
