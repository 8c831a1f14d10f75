"""What tests ask about processes that are not their own children."""

import time
from collections.abc import Iterable

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether it is alive: not a later process of the same pid, and not a zombie that init has yet to reap."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_after(processes: Iterable[psutil.Process], *, within_s: float) -> list[psutil.Process]:
    """Those that still run when the limit is over; returns as soon as none does."""
    deadline = time.monotonic() + within_s
    left = [process for process in processes if runs(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [process for process in left if runs(process)]
    return left
