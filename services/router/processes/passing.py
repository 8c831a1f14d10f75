"""What a secondary does: passes requests on, with a copy of the registry and connections that it is given.

Owns nothing that must outlive it. It ends when the primary says so, or is gone.
"""

import asyncio
import contextlib
import itertools
import os
import socket
from pathlib import Path

import structlog
import uvloop

from furlong import logs
from furlong.config import RunConfig
from furlong.rundir import RunDir
from furlong.telemetry import Telemetry
from services.router.footprint import settle
from services.router.http.front import Front
from services.router.http.server import Server, serve_http
from services.router.processes.counts import SharedCounts, num_slots
from services.router.processes.door import DoorEnd
from services.router.processes.frames import Frame, Link
from services.router.processes.handdown import Descriptors, Hello, Logging
from services.router.processes.memory import SharedMemory
from services.router.processes.mirror import MirrorWorkers, News
from services.router.processes.relay import Relay
from services.router.processes.waker import Waker
from services.router.router import Router
from services.router.watch.watching import watching

log = structlog.get_logger()

REGISTRY_TIMEOUT_S = 10.0
SIGN_S = 1.0
"""How often the primary hears that all is well."""
SNAPSHOT_SIGNS = 5
"""Every so many times with the counters, so that little of them is lost if this process is killed."""
FLUSH_S = 2.0


def run(frame: Frame, link: socket.socket, descriptors: Descriptors) -> None:
    """Until told to stop. frame: the first one."""
    hello = Hello.of(frame)
    telemetry = _set_up_logs(hello.logging, f"router-{hello.column}")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Passing(hello, descriptors).serve(link))
    finally:
        if telemetry is not None:
            telemetry.close(timeout_s=FLUSH_S)


class Passing:
    """The router's part that a secondary has."""

    def __init__(self, hello: Hello, descriptors: Descriptors) -> None:
        settings, self._column = hello.settings, hello.column
        self._drain_s = hello.drain_s
        self._descriptors = descriptors
        self._memory = SharedMemory(descriptors.memory, num_processes=settings.processes, num_slots=num_slots(settings))
        counts = SharedCounts(self._memory, settings, column=self._column, wakers=descriptors.wakers)
        self._news = News(self._send_news)
        self._workers = MirrorWorkers(settings, counts, news=self._news)
        self._router = router = Router(settings, workers=self._workers)
        router.observer.process = str(self._column)
        self._link: Link
        self._relay: Relay
        self._first = asyncio.Event()
        self._stop = asyncio.Event()

    async def serve(self, link: socket.socket) -> None:
        """Until told to stop."""
        self._link = await Link.over(link)
        self._link.on_room = self._news.flush
        self._relay = Relay(self._link.send)
        self._link.begin(self._on_frame, lambda: os._exit(0))  # then the primary is gone
        async with asyncio.timeout(REGISTRY_TIMEOUT_S):
            await self._first.wait()
        settle()
        router = self._router
        tasks = [asyncio.create_task(router.tend()), asyncio.create_task(self._give_signs())]
        for task in tasks:
            task.add_done_callback(_ended)
        front = Front(router.proxy, self._relay)
        with contextlib.closing(Waker(self._descriptors.wakers[self._column], self._workers.recount)):
            async with watching(router.observer), serve_http(front, self._accept, drain_s=self._drain_s) as sweep:
                sweep.add_done_callback(_ended)
                self._link.send({"ready": True})
                log.info("router_process_ready", process=self._column, pid=os.getpid())
                await self._stop.wait()
                router.stop_taking()
            for task in tasks:
                task.cancel()
            await router.close()
        self._link.send({"snapshot": router.observer.snapshot(), "asked": 0})
        await self._link.finish(FLUSH_S)

    async def _accept(self, server: Server) -> DoorEnd:
        door = socket.socket(fileno=self._descriptors.door)
        return DoorEnd(door, server, self._memory, column=self._column)

    def _on_frame(self, frame: Frame, blob: bytes) -> None:
        if "version" in frame:
            self._workers.follow(frame["workers"])
            self._link.send({"ack": frame["version"]})
            self._first.set()
        elif "answer" in frame:
            self._relay.on_answer(frame, blob)
        elif "ask" in frame:
            self._link.send({"snapshot": self._router.observer.snapshot(), "asked": frame["ask"]})
        elif "stop" in frame:
            self._stop.set()

    def _send_news(self, frame: Frame) -> bool:
        if self._link.full:
            return False
        self._link.send(frame)
        return True

    async def _give_signs(self) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(SIGN_S)
            if self._link.full:
                continue
            if number % SNAPSHOT_SIGNS:
                self._link.send({"sign": number})
            else:
                self._link.send({"snapshot": self._router.observer.snapshot(), "asked": 0})


def _ended(task: "asyncio.Task[None]") -> None:
    """A task that must not end has failed: the primary starts another process."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task_failed", task=task.get_name(), error=repr(error), exc_info=error)
        os._exit(1)


def _set_up_logs(logging: Logging | None, instance: str) -> Telemetry | None:
    if logging is None:
        path, level = None, "warning"
        logs.configure(
            run="", service="router", instance=instance, level=level, path=path, to_stderr=True, telemetry=None
        )
        return None
    config = RunConfig.model_validate_json(logging.config)
    run_dir = RunDir(Path(config.run.run_dir))
    telemetry = Telemetry.for_run(config, run_dir, service="router", instance=instance)
    if not logging.ships:
        telemetry.switch_off()
    logs.configure(
        run=config.run.name,
        service="router",
        instance=instance,
        level=config.run.log_level,
        path=run_dir.log(instance),
        to_stderr=logging.foreground,
        telemetry=telemetry,
    )
    return telemetry
