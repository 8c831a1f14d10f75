"""Waking a process of the router by an event descriptor that all of them have."""

import asyncio
import contextlib
import os
from collections.abc import Callable


class Waker:
    """Calls back on the event loop when another process wakes this one; many wakes close together are one."""

    def __init__(self, fd: int, wake: Callable[[], None]) -> None:
        """fd: an event descriptor that does not block."""
        self._fd = fd
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._woken)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._wake()

    def close(self) -> None:
        """Listen no more."""
        self._loop.remove_reader(self._fd)
