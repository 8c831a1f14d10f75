"""What happens to the fake engines, and a stand-in for the rollout service that keeps the router in step with them.

The stand-in does what the rollout service does: it registers engines, takes all of them out of the router before it
changes weights, and lets an engine in again only once that holds the newest.
"""

import asyncio
import contextlib
import random
from collections import Counter
from typing import cast

import grpc
import grpc.aio

from furlong.v1 import router_pb2, router_pb2_grpc
from tests.system.chaos_engines import Engine

CALL_TIMEOUT_S = 10.0
STALE_DOWN_S = (2.0, 4.0)
"""How long an engine is away that comes back with old weights and tells nobody: real ones load theirs for longer."""


class Rollout:
    """The stand-in. `floor` is the least version that a request sent now may be answered by."""

    def __init__(self, address: str, engines: list[Engine]) -> None:
        self.floor = -1
        self.version = 0
        self.num_updates = 0
        self.num_confirmed = 0
        self._engines = {engine.url: engine for engine in engines}
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = cast("router_pb2_grpc.RouterAsyncStub", router_pb2_grpc.RouterStub(self._channel))
        self._registered: set[str] = set()
        self._step = asyncio.Lock()

    def has_erred(self, url: str) -> bool:
        """Whether that engine ever gave cause to complain."""
        return url in self._engines and self._engines[url].num_faults > 0

    async def add(self, engine: Engine) -> None:
        """Register an engine, again if it is known, and confirm its weights."""
        async with self._step:
            request = router_pb2.AddWorkerRequest(url=engine.url)
            await self._stub.AddWorker(request, timeout=CALL_TIMEOUT_S)
            self._registered.add(engine.url)
            await self._confirm(engine)

    async def remove(self, engine: Engine) -> None:
        """Take it out; what it has in flight ends in peace."""
        async with self._step:
            self._registered.discard(engine.url)
            with contextlib.suppress(grpc.aio.AioRpcError):  # NOT_FOUND: it is out already
                request = router_pb2.RemoveWorkerRequest(worker=engine.url)
                await self._stub.RemoveWorker(request, timeout=CALL_TIMEOUT_S)

    async def update_weights(self) -> None:
        """A new version for all engines that can take it."""
        async with self._step:
            known = [self._engines[url] for url in sorted(self._registered)]
            await asyncio.gather(*(self._set(engine, admit=False) for engine in known))
            self.version += 1
            self.floor = self.version  # nobody who holds less is admitted any more
            self.num_updates += 1
            await asyncio.gather(*(self._confirm(engine) for engine in known))

    async def tend(self) -> None:
        """Confirm every registered engine that the router is not sure of; until cancelled."""
        request = router_pb2.WatchWorkersRequest()
        while True:
            async for workers in self._stub.WatchWorkers(request):
                for worker in workers.workers:
                    engine = self._engines[worker.url]
                    if not worker.HasField("policy_version") and engine.alive and worker.url in self._registered:
                        async with self._step:
                            await self._confirm(engine)

    async def workers(self) -> list[router_pb2.Worker]:
        """As the router has them."""
        listed = await self._stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=CALL_TIMEOUT_S)
        return list(listed.workers)

    async def close(self) -> None:
        await self._channel.close()

    async def _confirm(self, engine: Engine) -> None:
        """Bring its weights up to date and let it in. An engine that hangs or is gone cannot take them."""
        life = engine.life
        await asyncio.sleep(0.01)
        if engine.alive and not engine.hung and engine.life == life:
            engine.version = self.version
            self.num_confirmed += 1
            await self._set(engine, admit=True)

    async def _set(self, engine: Engine, *, admit: bool) -> None:
        version = self.version if admit else None
        request = router_pb2.SetWorkerStateRequest(worker=engine.url, admit=admit, policy_version=version)
        with contextlib.suppress(grpc.aio.AioRpcError):  # NOT_FOUND: removed meanwhile
            await self._stub.SetWorkerState(request, timeout=CALL_TIMEOUT_S)


class Trouble:
    """Makes trouble at random, one engine at a time, and ends it again. Only `chance` decides what and to whom."""

    def __init__(self, engines: list[Engine], rollout: Rollout, chance: random.Random) -> None:
        self._engines = engines
        self._rollout = rollout
        self._chance = chance
        self._busy: set[Engine] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.kinds: Counter[str] = Counter()

    async def make(self, *, seconds: float, every_s: float) -> None:
        """For so long. At most half of the engines are in trouble at once. Returns when all trouble is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * every_s)
            idle = [engine for engine in self._engines if engine not in self._busy]
            if len(idle) > len(self._engines) / 2:
                self._begin(self._chance.choice(idle))
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.discard(task)
                task.result()
        await asyncio.gather(*self._tasks)

    def _begin(self, engine: Engine) -> None:
        kinds = (self._restart, self._return_stale, self._hang, self._leave, self._reset, self._hang_and_die)
        kind = self._chance.choice(kinds)
        self.kinds[kind.__name__.strip("_")] += 1
        self._busy.add(engine)
        task = asyncio.create_task(kind(engine))
        task.add_done_callback(lambda _: self._busy.discard(engine))
        self._tasks.add(task)

    async def _restart(self, engine: Engine) -> None:
        """It dies; whoever started it registers it anew before it is there again."""
        engine.die()
        await asyncio.sleep(self._chance.uniform(0.0, 0.5))
        await self._rollout.add(engine)
        await engine.start()

    async def _return_stale(self, engine: Engine) -> None:
        """It dies and comes back with old weights, and nobody says a word."""
        engine.die()
        await asyncio.sleep(self._chance.uniform(*STALE_DOWN_S))
        await engine.start()

    async def _hang(self, engine: Engine) -> None:
        engine.hang()
        await asyncio.sleep(self._chance.uniform(0.1, 5.0))
        engine.wake()

    async def _hang_and_die(self, engine: Engine) -> None:
        engine.hang()
        await asyncio.sleep(self._chance.uniform(0.1, 2.0))
        await self._return_stale(engine)

    async def _leave(self, engine: Engine) -> None:
        """Removed under load, and registered again later."""
        await self._rollout.remove(engine)
        await asyncio.sleep(self._chance.uniform(0.1, 1.0))
        await self._rollout.add(engine)

    async def _reset(self, engine: Engine) -> None:
        """All its connections break, it lives on."""
        engine.num_faults += 1
        for connection in list(engine.connections):
            connection.transport.abort()
