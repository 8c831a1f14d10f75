"""Keeps the router in step with the engines: registered, admitted only while READY, removed when gone.

The router may be restarted at any time, on another port: it is found again and told anew. Never admits an engine that
the fleet does not call READY.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog

from furlong import addresses, rpc
from furlong.addresses import NotReachable
from furlong.config import RunConfig
from furlong.rundir import RunDir
from furlong.v1 import router_pb2, router_pb2_grpc
from services.rollout.fleet import READY, Engine, Fleet

log = structlog.get_logger()

SYNC_INTERVAL_S = 1.0
CALL_TIMEOUT_S = 5.0
POLL_S = 0.05


@dataclass(frozen=True)
class RouterPlace:
    """Where the router listens."""

    grpc: str
    http: str


class RouterLink:
    """The connection to the router."""

    def __init__(self, config: RunConfig, run_dir: RunDir, fleet: Fleet) -> None:
        self._config = config
        self._run_dir = run_dir
        self._fleet = fleet
        self._place: RouterPlace | None = None
        self._channel: grpc.aio.Channel | None = None
        self._registered: dict[str, str] = {}  # engine id -> url under which the router knows it
        self._told: dict[str, tuple[bool, int | None]] = {}  # engine id -> admission and version as the router was told
        self._lock = asyncio.Lock()
        self._poke = asyncio.Event()
        fleet.on_change(lambda engine: self._poke.set())

    @property
    def http(self) -> str:
        """Base address of the router's HTTP side."""
        return self._place.http if self._place else ""

    async def connect(self, timeout_s: float) -> None:
        """Find the router and register the engines. Raises NotReachable."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self._sync()
                return
            except (NotReachable, grpc.aio.AioRpcError) as error:
                if time.monotonic() > deadline:
                    raise NotReachable(
                        f"the router did not answer within {timeout_s:g} s: {_words(error)}. Is it started, with "
                        "the same --run-dir? The limit: --start-timeout-s."
                    ) from error
            await asyncio.sleep(POLL_S)

    async def wait_back(self, timeout_s: float) -> None:
        """Return once the router answers, or the limit is over."""
        with contextlib.suppress(NotReachable):
            await self.connect(timeout_s)

    async def keep(self) -> None:
        """Tell the router of every change, and look once a second whether it still knows. Runs until cancelled."""
        lost = False
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SYNC_INTERVAL_S):  # wait_for may swallow a cancellation
                    await self._poke.wait()
            self._poke.clear()
            try:
                await self._sync()
                if lost:
                    log.info("router_found_again", http=self.http)
                lost = False
            except (NotReachable, grpc.aio.AioRpcError) as error:
                if not lost:
                    log.warning("router_lost", error=_words(error))
                lost = True
                await asyncio.sleep(POLL_S)

    async def settle(self, timeout_s: float) -> None:
        """Have the router know the engines' present state. Raises NotReachable."""
        await self.connect(timeout_s)

    async def wait_routable(self, policy_version: int, *, timeout_s: float) -> bool:
        """Wait until the router itself sends requests to an engine of a version; whether it does."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(NotReachable, grpc.aio.AioRpcError):
                await self._sync()
                known = await self._stub().ListWorkers(router_pb2.ListWorkersRequest(), timeout=CALL_TIMEOUT_S)
                ours = {engine.url for engine in self._fleet.ready(policy_version)}
                ready = {w.url for w in known.workers if w.state == router_pb2.WORKER_STATE_READY}
                if ours and ours <= ready:
                    return True
            await asyncio.sleep(POLL_S)
        return False

    async def close(self) -> None:
        """Take our engines out of the router and hang up. Never raises: the router may be gone."""
        with contextlib.suppress(NotReachable, grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(CALL_TIMEOUT_S):
                for engine_id in list(self._registered):
                    await self._remove(engine_id)
        if self._channel is not None:
            await self._channel.close()

    async def _sync(self) -> None:
        async with self._lock:
            await self._find()
            known = await self._stub().ListWorkers(router_pb2.ListWorkersRequest(), timeout=CALL_TIMEOUT_S)
            workers = {worker.url: worker for worker in known.workers}
            for engine in self._fleet.engines:
                await self._sync_engine(engine, workers)

    async def _sync_engine(self, engine: Engine, workers: dict[str, router_pb2.Worker]) -> None:
        old = self._registered.get(engine.engine_id)
        if old is not None and (old != engine.url or not engine.answers):
            await self._remove(engine.engine_id)
        if not engine.answers:
            return
        admit, version = engine.state == READY, engine.policy_version
        if engine.url not in workers:
            request = router_pb2.AddWorkerRequest(url=engine.url, admit_without_policy_version=False)
            await self._stub().AddWorker(request, timeout=CALL_TIMEOUT_S)
            self._registered[engine.engine_id] = engine.url
            self._told.pop(engine.engine_id, None)
        self._registered[engine.engine_id] = engine.url
        worker = workers.get(engine.url)
        told = self._told.get(engine.engine_id)
        wanted = (admit, version)
        same = worker is not None and (worker.policy_version if worker.HasField("policy_version") else None) == version
        if told == wanted and same:
            return
        request = router_pb2.SetWorkerStateRequest(worker=engine.url, admit=admit, policy_version=version)
        try:
            await self._stub().SetWorkerState(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise
            self._poke.set()  # it was dropped between the two calls: the next look adds it again
            return
        self._told[engine.engine_id] = wanted

    async def _remove(self, engine_id: str) -> None:
        url = self._registered.pop(engine_id)
        self._told.pop(engine_id, None)
        try:
            await self._stub().RemoveWorker(router_pb2.RemoveWorkerRequest(worker=url), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise

    async def _find(self) -> None:
        place = self._look_up()
        if place == self._place:
            return
        if self._channel is not None:
            await self._channel.close()
        self._channel = rpc.aio_channel(place.grpc)
        self._place = place
        self._registered.clear()
        self._told.clear()

    def _look_up(self) -> RouterPlace:
        given = self._config.router.router_addr
        if given:
            http, _, grpc_address = given.partition(",")
            return RouterPlace(grpc_address, http.rstrip("/"))
        entry = addresses.find(self._run_dir, "router")
        if entry is None or entry.grpc is None or entry.http is None:
            raise NotReachable(f"no live router in {self._run_dir.addresses}")
        return RouterPlace(entry.grpc, entry.http.rstrip("/"))

    def _stub(self) -> "router_pb2_grpc.RouterAsyncStub":
        assert self._channel is not None
        return router_pb2_grpc.RouterStub(self._channel)  # pyrefly: ignore


def _words(error: Exception) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
