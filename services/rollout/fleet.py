"""The engines of this rollout service: what each is, holds and does; started, watched, restarted a few times, stopped.

The only writer of an engine's state. An engine is READY only while it holds one complete, verified policy version.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from furlong.config import RunConfig
from furlong.rundir import RunDir
from furlong.v1 import weights_pb2
from services.rollout.engine_process import EngineProcess, EngineStartFailed, count_gpus, start_engine

log = structlog.get_logger()

MAX_RESTARTS = 5
"""Times that one engine is started again within RESTART_WINDOW_S."""
RESTART_WINDOW_S = 600.0

STARTING = weights_pb2.ENGINE_STATE_STARTING
WAITING = weights_pb2.ENGINE_STATE_WAITING_FOR_WEIGHTS
UPDATING = weights_pb2.ENGINE_STATE_UPDATING
READY = weights_pb2.ENGINE_STATE_READY
GONE = weights_pb2.ENGINE_STATE_GONE


@dataclass
class Engine:
    """One engine. Only Fleet changes it."""

    engine_id: str
    index: int
    incarnation: int = 0
    """Counts its processes: a restarted engine is in no group and holds no weights."""
    url: str = ""
    state: "weights_pb2.EngineState" = STARTING
    policy_version: int | None = None
    group_rank: int | None = None
    why_gone: str = ""
    process: EngineProcess | None = None
    starts: list[float] = field(default_factory=list)

    @property
    def answers(self) -> bool:
        """Whether it can be spoken to."""
        return self.state in (WAITING, UPDATING, READY)

    def to_proto(self) -> weights_pb2.Engine:
        """As the wire has it."""
        process = self.process
        return weights_pb2.Engine(
            engine_id=self.engine_id,
            url=self.url,
            state=self.state,
            policy_version=self.policy_version,
            group_rank=self.group_rank,
            pid=process.pid if process and process.exit_status is None else None,
        )


class Fleet:
    """All engines."""

    def __init__(self, config: RunConfig, run_dir: RunDir) -> None:
        self._config = config
        self._run_dir = run_dir
        self.engines = [Engine(f"engine-{i}", i) for i in range(config.rollout.rollout_num_engines)]
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[Engine], None]] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._num_gpus = 0 if config.rollout.rollout_engine == "cpu" else count_gpus()

    @property
    def num_devices(self) -> int:
        """GPUs of all engines, or engine processes on the CPU."""
        return len(self.engines) * self._config.rollout.rollout_num_gpus_per_engine

    def on_change(self, listener: Callable[[Engine], None]) -> None:
        """Call a function after each change of an engine's state or version."""
        self._listeners.append(listener)

    async def start(self) -> list["asyncio.Task[None]"]:
        """Start all engines at once; the tasks that keep them. Raises EngineStartFailed if one does not come up."""
        try:
            async with asyncio.TaskGroup() as group:
                for engine in self.engines:
                    group.create_task(self._launch(engine))
        except* EngineStartFailed as failures:
            await self.stop(budget_s=0.0)
            first = failures.exceptions[0]
            refused = isinstance(first, EngineStartFailed) and first.refused
            raise EngineStartFailed(str(first), refused=refused) from failures
        self._keepers = [
            asyncio.create_task(self._keep(engine), name=f"keep-{engine.engine_id}") for engine in self.engines
        ]
        return self._keepers

    async def stop(self, budget_s: float) -> None:
        """End all engines: SIGTERM, and SIGKILL after the budget."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        processes = [engine.process for engine in self.engines if engine.process is not None]
        await asyncio.gather(*(process.stop(budget_s) for process in processes))

    def set_state(
        self, engine: Engine, state: "weights_pb2.EngineState", *, policy_version: int | None = None, why: str = ""
    ) -> None:
        """Change an engine's state. policy_version: only for READY. A gone engine stays gone until it is restarted."""
        assert (policy_version is not None) == (state == READY)
        if engine.state == GONE and state not in (STARTING, GONE):
            return
        engine.state, engine.policy_version, engine.why_gone = state, policy_version, why
        self._tell(engine)

    def ready(self, policy_version: int) -> list[Engine]:
        """The engines that serve a version."""
        return [e for e in self.engines if e.state == READY and e.policy_version == policy_version]

    async def wait_until(self, condition: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        """Wait until a condition on the engines holds; whether it does. Checked at every change."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            changed = self._changed
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                return condition()
        return True

    def describe_losses(self) -> str:
        """What each engine that cannot serve is or died of, for an error."""
        return "; ".join(
            f"{e.engine_id} is {weights_pb2.EngineState.Name(e.state).removeprefix('ENGINE_STATE_')}"
            + (f" ({e.why_gone})" if e.why_gone else "")
            for e in self.engines
            if e.state != READY
        )

    def end_process(self, engine: Engine, why: str) -> None:
        """Kill an engine that no longer answers; its keeper starts it again."""
        log.warning("engine_killed", engine=engine.engine_id, reason=why)
        self.set_state(engine, GONE, why=why)
        if engine.process is not None:
            engine.process.kill()

    async def _launch(self, engine: Engine) -> None:
        engine.incarnation += 1
        engine.starts.append(time.monotonic())
        engine.group_rank = None
        self.set_state(engine, STARTING)
        engine.process = await start_engine(
            self._config,
            name=engine.engine_id,
            index=engine.index,
            output=self._run_dir.log(engine.engine_id).with_suffix(".out"),
            num_gpus=self._num_gpus,
            inherited=_environment(),
        )
        engine.url = engine.process.url
        self.set_state(engine, WAITING)

    async def _keep(self, engine: Engine) -> None:
        """Watch one engine: note its death, and start it again as long as that makes sense."""
        while True:
            assert engine.process is not None
            status = await engine.process.wait()
            engine.process.kill()  # what is left of its process group
            words = engine.process.last_words()
            why = engine.why_gone if engine.state == GONE else f"ended with status {status}"
            self.set_state(engine, GONE, why=why)
            log.error("engine_gone", engine=engine.engine_id, exit_status=status, last_output=words)
            if not await self._start_again(engine):
                return

    async def _start_again(self, engine: Engine) -> bool:
        while True:
            now = time.monotonic()
            recent = [start for start in engine.starts if now - start < RESTART_WINDOW_S]
            if len(recent) > MAX_RESTARTS:
                log.error("engine_given_up", engine=engine.engine_id, starts=len(recent), window_s=RESTART_WINDOW_S)
                return False
            await asyncio.sleep(min(0.2 * 2 ** (len(recent) - 1), 10.0))
            try:
                await self._launch(engine)
                return True
            except EngineStartFailed as error:
                self.set_state(engine, GONE, why=str(error))
                log.error("engine_restart_failed", engine=engine.engine_id, error=str(error))

    def _tell(self, engine: Engine) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in self._listeners:
            listener(engine)


def protos(engines: Iterable[Engine]) -> list[weights_pb2.Engine]:
    """Engines as the wire has them."""
    return [engine.to_proto() for engine in engines]


def _environment() -> Mapping[str, str]:
    return dict(os.environ)
