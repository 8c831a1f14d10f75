"""Nothing that a run started outlives it: finds and ends processes below this one, engines and their helpers included.

Ends only descendants of this process that it did not have before.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Set

import psutil

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let the kernel hand us the children of children that die, so that none gets out of sight. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def running_descendants(*, besides: Set[int] = frozenset()) -> list[psutil.Process]:
    """Processes below this one that run (not zombies), except those given by pid."""
    found = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            if process.pid not in besides and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def kill_descendants(*, besides: Set[int] = frozenset(), timeout_s: float = 5.0) -> list[str]:
    """SIGKILL every one, again until none is left or the limit passes; what was killed, as `NAME (pid N)`."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while (found := running_descendants(besides=besides)) and time.monotonic() < deadline:
        for process in found:
            try:
                killed.setdefault(process.pid, f"{process.name()} (pid {process.pid})")
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        time.sleep(0.02)
    return list(killed.values())
