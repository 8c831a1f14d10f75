"""The primary's care for its secondaries: starts them, keeps their registry like its own, starts anew those that end.

Owns when a change is in force everywhere, and what becomes of what a process leaves behind when it dies.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import structlog

from services.router.http.asgi import App
from services.router.http.server import Accepting, Server
from services.router.processes.child import END_S, Child
from services.router.processes.counts import PRIMARY, PrimaryCounts, num_slots
from services.router.processes.door import Door
from services.router.processes.frames import Frame, encode
from services.router.processes.handdown import Hello, Logging
from services.router.processes.memory import SharedMemory
from services.router.processes.mirror import entry_of
from services.router.processes.registry import SharedWorkers
from services.router.processes.relay import RelayEnd
from services.router.processes.waker import Waker
from services.router.router import Router
from services.router.settings import RouterSettings
from services.router.watch.snapshot import Snapshot, ended, merge
from services.router.workers.worker import Worker

log = structlog.get_logger()

START_S = 20.0
"""What the processes get to start before the router begins without those that are late."""
ACK_LIMIT_S = 3.0
"""A process that has not acted on a change by then is killed: nobody may rely on what it does."""
ACK_LOOKS = 10
"""The limit is waited for in so many parts: what came while this process was stopped is read before it is judged."""
SILENT_S = 15.0
"""A process that gives no sign of life for so long is killed."""
LOOK_S = 1.0
LATE_S = 1.0
"""A look that comes so late says more of this process than of the others."""
ASK_S = 1.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Before a process is started anew: doubled each time, until one lives for GOOD_S."""
GOOD_S = 30.0
DRAIN_EXTRA_S = 3.0


class Primary:
    """The other processes of a router of several."""

    def __init__(self, settings: RouterSettings, *, drain_s: float, logging: Logging | None) -> None:
        num = settings.processes
        self._settings = settings
        self._hello = Hello(settings, PRIMARY, drain_s, logging)
        self.memory = SharedMemory.create(num_processes=num, num_slots=num_slots(settings))
        self._wakers = tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(num))
        self._counts = PrimaryCounts(self.memory, settings, wakers=self._wakers, taken_in=self._taken_in)
        self.workers = SharedWorkers(settings, self._counts)
        self._router: Router
        self._control: App
        self._door: Door | None = None
        self._children: dict[int, Child] = {}
        self._relays: dict[int, RelayEnd] = {}
        self._version = 0
        self._frame = b""
        self._dirty = True
        self._feeds = False
        self._leaving: WeakKeyDictionary[Worker, int] = WeakKeyDictionary()
        """The version of the registry from which on nobody takes the worker any more."""
        self._ended: Snapshot | None = None
        """What processes that are no more had counted."""
        self._num_restarts = 0
        self._stopping = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self, router: Router, control: App) -> AsyncGenerator[tuple["asyncio.Task[None]", ...]]:
        """The secondaries run while inside; the tasks that care for them. router: whose workers are this one's."""
        self._router, self._control = router, control
        router.others = self
        router.observer.others = self.snapshots
        self.workers.on_change.append(self._changed)
        columns = range(1, self._settings.processes)
        tasks = tuple(asyncio.create_task(self._keep(column), name=f"router_process_{column}") for column in columns)
        watch = asyncio.create_task(self._watch_signs(), name="router_processes_signs")
        try:
            with contextlib.closing(Waker(self._wakers[PRIMARY], self.workers.recount)):
                await self._until_ready(columns)
                yield (*tasks, watch)
        finally:
            watch.cancel()
            await self._end(tasks)

    def close(self) -> None:
        """Let go of what is shared. Once, at the end."""
        for fd in (self.memory.fd, *self._wakers):
            os.close(fd)

    def accept_on(self, sock: socket.socket) -> "Accept":
        """For the HTTP server."""
        return Accept(self, sock)

    def open_door(self, door: Door) -> None:
        """Connections come in."""
        self._door = door
        for child in self._children.values():
            self._seat(child)

    def stop(self) -> None:
        """Have the secondaries drain, as this process does."""
        self._stopping.set()
        for child in self._children.values():
            child.link.send({"stop": True})

    # What is in force

    async def settled(self) -> None:
        """Return once each process acts on all changes that were made so far; one that does not is no more then.

        One that only starts is not waited for: it takes no request before it acts on them (`_seat`).
        """
        self._feed()
        version = self._version
        begun = [child for child in self._children.values() if child.ready.is_set()]
        await asyncio.gather(*(self._settle(child, version) for child in begun))

    async def _settle(self, child: Child, version: int) -> None:
        for _ in range(ACK_LOOKS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACK_LIMIT_S / ACK_LOOKS):
                    await child.until_version(version)
                    return
        self._kill(child, f"did not act on a change within {ACK_LIMIT_S:g} s")
        await child.gone.wait()

    def _taken_in(self, worker: Worker) -> bool:
        version = self._leaving.setdefault(worker, self._version + 1)
        return all(child.version >= version for child in self._children.values())

    def _changed(self) -> None:
        self._dirty = True
        if not self._feeds:
            self._feeds = True
            asyncio.get_running_loop().call_soon(self._feed)

    def _feed(self) -> None:
        """Send the registry to those that have an older one and are done with the last that they were sent."""
        self._feeds = False
        if self._dirty:
            self._dirty = False
            self._version += 1
            entries = [entry_of(worker) for worker in self.workers.everybody_registered()]
            self._frame = encode({"version": self._version, "workers": entries})
        for child in self._children.values():
            self._send_registry(child)

    def _send_registry(self, child: Child) -> None:
        if child.version == child.sent_version < self._version:
            child.sent_version = self._version
            child.link.send_encoded(self._frame)

    # What the secondaries say

    def _on_frame(self, child: Child, relay: RelayEnd, frame: Frame, blob: bytes) -> None:
        if "call" in frame:
            relay.on_call(frame, blob)
        elif "left" in frame:
            relay.on_left(frame)
        elif "news" in frame:
            self._on_news(frame["news"])
        elif "ack" in frame:
            self._send_registry(child)
            self._seat(child)
            self.workers.recount()  # who was leaving may have left
        elif "ready" in frame:
            child.seat_at = self._version
            self._seat(child)

    def _seat(self, child: Child) -> None:
        """Give a process connections, once it acts on all that it was not waited for in `settled`."""
        if self._door is None or self._stopping.is_set() or child.seated:
            return
        if child.ready.is_set() and child.version >= child.seat_at:
            child.seated = True
            self._door.seat(child.column, child.door)

    def _on_news(self, news: dict[str, dict[str, str]]) -> None:
        for worker_id, said in news.items():
            worker = self.workers.find(worker_id)
            if worker is None:
                continue
            if "failed" in said:
                worker.last_error = said["failed"]
            if "gone" in said:
                self.workers.gone(worker, said["gone"])
            worker.probe_soon.set()

    async def snapshots(self) -> Sequence[Snapshot]:
        """Those of the secondaries, and what is left of those that ended."""
        asked = await asyncio.gather(*(child.ask_snapshot(ASK_S) for child in list(self._children.values())))
        left = self._ended or {}
        return [*(snapshot for snapshot in asked if snapshot), {**left, "process_restarts": self._num_restarts}]

    # Their life

    async def _keep(self, column: int) -> None:
        """Have a secondary run, until the router stops."""
        wait_s = FIRST_WAIT_S
        while not self._stopping.is_set():
            try:
                child = await self._start(column)
            except OSError as error:
                log.error("router_process_not_started", process=column, error=str(error))
                await self._pause(LONGEST_WAIT_S)
                continue
            await child.ended.wait()
            await self._take_back(child)
            if self._stopping.is_set():
                return
            self._num_restarts += 1
            wait_s = FIRST_WAIT_S if time.monotonic() - child.began > GOOD_S else min(2 * wait_s, LONGEST_WAIT_S)
            await self._pause(wait_s)

    async def _pause(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()

    async def _start(self, column: int) -> Child:
        child = await Child.start(replace(self._hello, column=column), self.memory, self._wakers)
        relay = self._relays[column] = RelayEnd(self._control, child.link.send)
        self._children[column] = child
        self._feed()
        if self._stopping.is_set():
            child.link.send({"stop": True})
        child.listen(lambda frame, blob: self._on_frame(child, relay, frame, blob))
        log.info("router_process_started", process=column, pid=child.popen.pid)
        return child

    async def _take_back(self, child: Child) -> None:
        """A secondary's link is closed: see that the process is gone, and undo what it left."""
        if self._door is not None:
            self._door.unseat(child.column)
        child.door.close()
        self._relays.pop(child.column).close()
        await child.reap(end_s=END_S if self._stopping.is_set() and not child.killed_for else 0.0)
        lost = self.memory.take_back(child.column, heir=PRIMARY)
        del self._children[child.column]
        if child.snapshot:
            self._ended = merge([*([self._ended] if self._ended else []), ended(child.snapshot)])
        child.forget()
        self._counts.wake_others()
        self.workers.recount()
        code = child.popen.returncode
        if not self._stopping.is_set():
            log.warning(
                "router_process_died",
                process=child.column,
                pid=child.popen.pid,
                exit_code=code,
                requests_lost=lost,
                reason=child.killed_for or f"ended with {code}",
            )
        elif code:
            log.warning("router_process_cut_short", process=child.column, pid=child.popen.pid, exit_code=code)

    def _kill(self, child: Child, reason: str) -> None:
        log.error("router_process_killed", process=child.column, pid=child.popen.pid, reason=reason)
        child.kill(reason)

    async def _watch_signs(self) -> None:
        while True:
            slept_from = time.monotonic()
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if now - slept_from > LOOK_S + LATE_S:
                continue  # this process did not run: what the others said meanwhile is not read yet
            for child in self._children.values():
                limit_s = SILENT_S if child.ready.is_set() else START_S
                if now - child.last_sign > limit_s and not child.killed_for:
                    self._kill(child, f"gave no sign of life for {limit_s:g} s")

    async def _until_ready(self, columns: range) -> None:
        deadline = time.monotonic() + START_S
        for column in columns:
            while (child := self._children.get(column)) is None or not child.ready.is_set():
                if time.monotonic() > deadline:
                    log.error("router_process_late", process=column, seconds=START_S)
                    return
                await asyncio.sleep(0.005)

    async def _end(self, tasks: Sequence["asyncio.Task[None]"]) -> None:
        """Wait for the secondaries to drain; end those that take too long."""
        self.stop()
        await asyncio.wait(tasks, timeout=self._hello.drain_s + DRAIN_EXTRA_S)
        for child in list(self._children.values()):
            self._kill(child, "did not end in time")
        await asyncio.wait(tasks, timeout=DRAIN_EXTRA_S)
        for task in tasks:
            task.cancel()
        for child in list(self._children.values()):
            await child.reap()


class Accept:
    """Opens the door for the HTTP server of the primary."""

    def __init__(self, primary: Primary, sock: socket.socket) -> None:
        self._primary = primary
        self._sock = sock

    async def __call__(self, server: Server) -> Accepting:
        door = Door(self._sock, server, self._primary.memory)
        self._primary.open_door(door)
        return door
