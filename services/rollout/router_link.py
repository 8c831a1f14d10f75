"""Keeps the router in step with the engines: registered, admitted only while READY, removed when gone.

The router may be restarted at any time, on another port: it is found again and told anew. Never admits an engine that
the fleet does not call READY, or that does not itself say, at that time, that it holds the version.
"""

import asyncio
import contextlib
import hashlib
import socket
import time
from collections.abc import Mapping

import aiohttp
import grpc.aio
import structlog

from furlong.addresses import NotReachable
from furlong.config import RunConfig
from furlong.rundir import RunDir
from furlong.v1 import router_pb2
from services.rollout.engine_http import EngineCallFailed, EngineHttp
from services.rollout.fleet import READY, WAITING, Engine, Fleet
from services.rollout.router_calls import CALL_TIMEOUT_S, RouterCalls, TokenRefused, Workers, version_of, words

log = structlog.get_logger()

SYNC_INTERVAL_S = 1.0
POLL_S = 0.05


class RouterLink:
    """The connection to the router."""

    def __init__(self, config: RunConfig, run_dir: RunDir, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        """session: for questions to engines."""
        self._router = RouterCalls(config, run_dir)
        self._fleet = fleet
        self._session = session
        self._labels = {"run": config.run.name, "owner": owner_of(run_dir)}
        self._registered: dict[str, str] = {}  # engine id -> url under which the router knows it
        self._told: dict[str, tuple[bool, int | None]] = {}  # engine id -> admission and version as the router was told
        self._lock = asyncio.Lock()
        self._poke = asyncio.Event()
        fleet.on_change(lambda engine: self._poke.set())

    @property
    def http(self) -> str:
        """Base address of the router's HTTP side."""
        return self._router.place.http if self._router.place else ""

    async def connect(self, timeout_s: float) -> None:
        """Find the router and register the engines. Raises NotReachable."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self._sync()
                return
            except TokenRefused:
                raise
            except (NotReachable, grpc.aio.AioRpcError) as error:
                if time.monotonic() > deadline:
                    raise NotReachable(
                        f"the router did not answer within {timeout_s:g} s: {words(error)}. Is it started, with "
                        "the same --run-dir? The limit: --start-timeout-s."
                    ) from error
            await asyncio.sleep(POLL_S)

    async def wait_back(self, timeout_s: float) -> None:
        """Return once the router answers, or the limit is over."""
        with contextlib.suppress(NotReachable):
            await self.connect(timeout_s)

    async def check_engines(self) -> None:
        """An answer was of another policy version than it should: find whose, and have the router know. Never raises
        for a router that is away."""
        async with self._lock:
            ready = [engine for engine in self._fleet.engines if engine.state == READY]
            for engine in ready:
                if engine.policy_version is not None:
                    await self._holds(engine, engine.policy_version)
        with contextlib.suppress(NotReachable, grpc.aio.AioRpcError):
            await self._sync()

    async def keep(self) -> None:
        """Tell the router of every change, here and there, and look once a second whether it still knows. Runs until
        cancelled."""
        watching = asyncio.create_task(self._watch(), name="router-watch")
        lost = ""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SYNC_INTERVAL_S):  # wait_for may swallow a cancellation
                        await self._poke.wait()
                self._poke.clear()
                if watching.done():
                    watching.result()
                try:
                    await self._sync()
                    if lost:
                        log.info("router_found_again", http=self.http)
                    lost = ""
                except (NotReachable, grpc.aio.AioRpcError) as error:
                    if lost != type(error).__name__:  # one that is away may come back and refuse our token
                        log.warning("router_lost", error=words(error))
                    lost = type(error).__name__
                    await asyncio.sleep(POLL_S)
        finally:
            watching.cancel()

    async def settle(self, timeout_s: float) -> None:
        """Have the router know the engines' present state. Raises NotReachable."""
        await self.connect(timeout_s)

    async def wait_routable(self, policy_version: int, *, timeout_s: float) -> bool:
        """Wait until the router itself sends requests to an engine of a version; whether it does."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(NotReachable, grpc.aio.AioRpcError):
                await self._sync()
                known = await self._router.workers()
                ours = {engine.url for engine in self._fleet.ready(policy_version)}
                ready = {url for url, worker in known.items() if worker.state == router_pb2.WORKER_STATE_READY}
                if ours and ours <= ready:
                    return True
            await asyncio.sleep(POLL_S)
        return False

    async def close(self) -> None:
        """Take our engines out of the router and hang up. Never raises: the router may be gone."""
        with contextlib.suppress(NotReachable, grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(CALL_TIMEOUT_S):
                while self._registered:
                    await self._router.remove(self._registered.popitem()[1])
        await self._router.close()

    async def _watch(self) -> None:
        """Have every change at the router looked at when it happens: one that came back knows no policy version, and
        none of a worker that it saw die."""
        pause_s = POLL_S
        while True:
            with contextlib.suppress(NotReachable, grpc.aio.AioRpcError):
                async with contextlib.aclosing(self._router.watch()) as changes:
                    async for workers in changes:
                        pause_s = POLL_S
                        if self._differs(workers):
                            self._poke.set()
            self._poke.set()
            await asyncio.sleep(pause_s)
            pause_s = min(SYNC_INTERVAL_S, 2 * pause_s)

    def _differs(self, workers: Workers) -> bool:
        """Whether the router knows something else of an engine than what holds."""
        return any(
            (worker := workers.get(engine.url)) is None or version_of(worker) != engine.policy_version
            for engine in self._fleet.engines
            if engine.answers
        )

    async def _sync(self) -> None:
        async with self._lock:
            if await self._router.find():
                self._registered.clear()
                self._told.clear()
            workers = await self._router.workers()
            await self._remove_left_over(workers)
            for engine in self._fleet.engines:
                await self._sync_engine(engine, workers)

    async def _sync_engine(self, engine: Engine, workers: Workers) -> None:
        old = self._registered.get(engine.engine_id)
        if old is not None and (old != engine.url or not engine.answers):
            del self._registered[engine.engine_id]
            self._told.pop(engine.engine_id, None)
            await self._router.remove(old)
        if not engine.answers:
            return
        worker = workers.get(engine.url)
        if worker is None:
            self._told.pop(engine.engine_id, None)
            await self._router.add(engine.url, labels={**self._labels, "engine": engine.engine_id})
        self._registered[engine.engine_id] = engine.url
        known = (self._told.get(engine.engine_id), version_of(worker) if worker else None)
        wanted = (engine.state == READY, engine.policy_version)
        if known == (wanted, engine.policy_version):
            return
        if engine.policy_version is not None and not await self._holds(engine, engine.policy_version):
            wanted = (False, None)
            if known == (wanted, None):  # each telling is a change, and each change has us look again
                return
        admit, version = wanted
        if await self._router.set_state(engine.url, admit=admit, policy_version=version):
            self._told[engine.engine_id] = wanted
        else:
            self._poke.set()  # it was dropped between the two calls: the next look adds it again

    async def _holds(self, engine: Engine, version: int) -> bool:
        """Whether the engine says itself that it holds a version. One that holds another is out until the next update:
        whatever the fleet believed of it was wrong."""
        before = (engine.incarnation, engine.state, engine.policy_version)
        http = EngineHttp(self._session, engine.engine_id, engine.url)
        try:
            told = await http.get("/model_info", timeout_s=CALL_TIMEOUT_S)
        except EngineCallFailed as error:
            log.warning("engine_not_asked", engine=engine.engine_id, policy_version=version, error=error.problem)
            return False
        if (engine.incarnation, engine.state, engine.policy_version) != before:
            return False  # what it says may be of before or after the change, which is looked at next
        held = told.get("weight_version") if isinstance(told, Mapping) else None
        if held == str(version):
            return True
        log.error("engine_holds_another_version", engine=engine.engine_id, held=held, policy_version=version)
        self._fleet.set_state(engine, WAITING)
        return False

    async def _remove_left_over(self, workers: Workers) -> None:
        """Engines of an earlier start of this run, whose rollout service could not take them out."""
        ours = {engine.url for engine in self._fleet.engines} | set(self._registered.values())
        for url, worker in workers.items():
            if worker.labels.get("owner") == self._labels["owner"] and url not in ours:
                log.info("left_over_engine_removed", url=url, engine=worker.labels.get("engine"))
                await self._router.remove(url)


def owner_of(run_dir: RunDir) -> str:
    """Names a run directory on this host among all whose engines share a router."""
    text = f"{socket.gethostname()}:{run_dir.root.absolute()}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
