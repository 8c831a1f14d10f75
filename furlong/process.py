"""The life of a process: exit codes, stop signals, and the leash that ties a child to its parent.

Nothing here starts at import. A process calls `die_with_parent` and `StopSignal.install` in its main thread.
"""

import _thread
import asyncio
import contextlib
import ctypes
import enum
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

PR_SET_PDEATHSIG = 1
STARTED_AGAIN = "FURLONG_STARTED_AGAIN"
"""In the environment of a service that is started again: how the process before it ended."""


class ExitCode(enum.IntEnum):
    """How a process ended; they tell the truth apart."""

    DONE = 0
    """All work done."""
    CRASHED = 1
    """An error that nobody asked for."""
    BAD_CONFIG = 2
    """Refused at start: configuration, files, addresses."""
    DRAINED = 3
    """Asked to stop; the iteration was finished and saved."""
    DIVERGED = 4
    """Training stopped since its numbers were no longer sound."""
    PEER_LOST = 5
    """A service that this one cannot work without went away."""
    KILLED = 6
    """Stopped before it could finish: by a second signal, or since its drain budget was over."""
    HALTED = 7
    """Stopped for an alert that --halt-on names, and that is not about training's numbers; saved as after a stop."""


def die_with_parent(parent_pid: int | None) -> None:
    """Have the kernel kill this process when its parent ends, however it ends. Linux only; elsewhere does nothing.

    parent_pid: the parent as it was when it started us; if that is gone already, exit at once. None: no leash.
    The kernel means the parent's thread that started us: a parent must not start a leashed child from a thread that
    ends before it does.
    """
    if parent_pid is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent died before the leash was on
        os._exit(ExitCode.PEER_LOST)


class StopSignal:
    """Turns SIGTERM, SIGINT and a service's own failure into something that can be waited for.

    The first signal sets `requested`; a second ends the process at once with ExitCode.KILLED. `code` is what the
    process should exit with: DRAINED after a signal, or what `request` was given.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.reason = ""
        self.code = ExitCode.DONE
        self._callbacks: list[Callable[[], object]] = []
        self._signalled = False

    def install(self) -> "StopSignal":
        """Handle SIGTERM and SIGINT from now on. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        return self

    def request(self, reason: str, *, code: ExitCode = ExitCode.DRAINED) -> None:
        """Ask for a stop from within, as a signal would; any thread. The first reason and code stay."""
        if not self.requested.is_set():
            self.reason, self.code = reason, code
            self.requested.set()
            for callback in list(self._callbacks):
                callback()

    async def wait(self) -> None:
        """Return once a stop is requested."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits there
                loop.call_soon_threadsafe(event.set)

        self._callbacks.append(wake)
        try:
            if not self.requested.is_set():
                await event.wait()
        finally:
            self._callbacks.remove(wake)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two instructions of the main thread, which may hold the very lock that `requested` needs;
        so the request is made from another thread."""
        if self._signalled:
            os._exit(ExitCode.KILLED)
        self._signalled = True
        _thread.start_new_thread(self.request, (signal.Signals(number).name,))
