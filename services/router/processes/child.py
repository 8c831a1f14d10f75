"""One secondary, as the primary sees it: started, heard, killed. Decides nothing."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from services.router.processes.frames import Frame, Link
from services.router.processes.handdown import Descriptors, Hello
from services.router.processes.memory import SharedMemory
from services.router.watch.snapshot import Snapshot

REAP_S = 10.0
END_S = 3.0
"""What a process that was told to stop gets, once its link is closed, to hand over its last log lines and end."""
PROGRAM = "services.router.processes.secondary"


class Child:
    """A running secondary. `start` makes one."""

    def __init__(self, popen: "subprocess.Popen[bytes]", door: socket.socket, link: Link, *, column: int) -> None:
        self.popen = popen
        self.door = door
        self.link = link
        self.column = column
        self.began = self.last_sign = time.monotonic()
        self.sent_version = 0
        self.version = 0
        """Of the registry that it acts on."""
        self.ready = asyncio.Event()
        self.seat_at = 0
        """The version of the registry that it must act on before it gets connections."""
        self.seated = False
        """It gets connections."""
        self.ended = asyncio.Event()
        """Its end of the link is closed."""
        self.gone = asyncio.Event()
        """The process is no more, and what it held has been taken back."""
        self.snapshot: Snapshot = {}
        """The last one that came."""
        self.killed_for = ""
        self._acked = asyncio.Event()
        self._asked: dict[int, asyncio.Future[Snapshot]] = {}
        self._last_asked = 0

    @classmethod
    async def start(cls, hello: Hello, memory: SharedMemory, wakers: tuple[int, ...]) -> "Child":
        """Start the process and greet it. Raises OSError."""
        link, link_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        door, door_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with link_end, door_end:
            try:
                popen = _spawn(Descriptors(link_end.fileno(), door_end.fileno(), memory.fd, wakers))
            except OSError:
                link.close()
                door.close()
                raise
        child = cls(popen, door, await Link.over(link), column=hello.column)
        child.link.send(hello.frame())
        return child

    def listen(self, on_frame: Callable[[Frame, bytes], None]) -> None:
        """Call on_frame for each frame that is not for the child's own book-keeping."""

        def heard(frame: Frame, blob: bytes) -> None:
            self.last_sign = time.monotonic()
            if "ack" in frame:
                self.version = frame["ack"]
                self._acked.set()
            elif "snapshot" in frame:
                self.snapshot = frame["snapshot"]
                if (asked := self._asked.pop(frame["asked"], None)) is not None and not asked.done():
                    asked.set_result(self.snapshot)
            elif "ready" in frame:
                self.ready.set()
            on_frame(frame, blob)

        self.link.begin(heard, self.ended.set)

    async def until_version(self, version: int) -> None:
        """Return once it acts on a registry at least as new, or is gone."""
        while self.version < version and not self.gone.is_set():
            self._acked.clear()
            await self._acked.wait()

    async def ask_snapshot(self, timeout_s: float) -> Snapshot:
        """Its counters now; when it does not answer in time, those that it told last."""
        if self.ended.is_set():
            return self.snapshot
        self._last_asked += 1
        asked = self._asked[self._last_asked] = asyncio.get_running_loop().create_future()
        self.link.send({"ask": self._last_asked})
        try:
            async with asyncio.timeout(timeout_s):
                return await asked
        except TimeoutError:
            return self.snapshot
        finally:
            self._asked.pop(self._last_asked, None)

    def kill(self, reason: str) -> None:
        """End it at once."""
        self.killed_for = self.killed_for or reason
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()

    async def reap(self, *, end_s: float = 0.0) -> None:
        """Have it ended, whatever state it is in. The process is no more when this returns. end_s: for it to end by
        itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.popen.wait, end_s)
        self.popen.kill()
        await asyncio.to_thread(self.popen.wait, REAP_S)
        await self.link.finish(0.1)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(self.snapshot)

    def forget(self) -> None:
        """What it held was taken back."""
        self.gone.set()
        self._acked.set()


def _spawn(descriptors: Descriptors) -> "subprocess.Popen[bytes]":
    """From the main thread, whose end is the child's. Signals that a whole group gets are not for it from the start."""
    numbers = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(os.getpid()), str(descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors.all,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
