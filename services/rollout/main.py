"""Assembles the rollout service: engines, router, prompts, rewards, gRPC; and takes it apart again.

Fails at start for whatever can be known at start. At its end no engine is left running.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import uvloop

from furlong import addresses, rpc
from furlong.addresses import NotReachable
from furlong.config import ConfigError, RunConfig
from furlong.config.errors import Problem
from furlong.folderlock import FolderLock
from furlong.launch.routerfiles import router_tls
from furlong.service import ServiceContext, run_async
from furlong.v1 import rollout_pb2_grpc
from services.rollout.batch_reports import BatchReports
from services.rollout.batch_store import BatchStore
from services.rollout.batches import Batches
from services.rollout.engine_news import EngineNews
from services.rollout.engine_process import EngineStartFailed
from services.rollout.evaluation import Evaluations
from services.rollout.feed import PromptFeed
from services.rollout.flags import flags_of
from services.rollout.fleet import Fleet
from services.rollout.generation import Generator
from services.rollout.group_maker import GroupMaker
from services.rollout.log_hooks import LogHooks
from services.rollout.prompts import PromptSet, PromptSource, load_prompts
from services.rollout.reporting import Reporter
from services.rollout.rewards import RewardFunction
from services.rollout.router_link import RouterLink
from services.rollout.servicer import SERVICE, Parts, RolloutServicer
from services.rollout.settings import settings_fingerprint
from services.rollout.tokenizer import ModelLimits, Tokenizer, load_tokenizer, read_model_limits
from services.rollout.training_rollouts import IdleClock, TrainingRollouts
from services.rollout.unfinished_reports import UnfinishedReports
from services.rollout.weight_update import WeightUpdates

KEEPALIVE_S = 3.0
"""Idle connections are dropped before SGLang's and uvicorn's 5 s, so that none breaks as it is used again."""


def main(config: RunConfig, *, rank: int, foreground: bool) -> int:
    """Run the rollout service; its exit code."""
    return run_async(config, service="rollout", foreground=foreground, serve=serve, loop_factory=uvloop.new_event_loop)


@contextlib.asynccontextmanager
async def serve(context: ServiceContext) -> AsyncGenerator[None]:
    """SERVING inside, drained outside."""
    config = context.config
    flags = flags_of(config)
    rewards, hooks = RewardFunction(config, flags), LogHooks(config, flags)
    limits = read_model_limits(Path(config.model.hf_checkpoint))
    tokenizer = load_tokenizer(config)
    fleet = Fleet(config, context.run_dir)
    fleet.on_change(EngineNews(context.telemetry).take)
    servicer = RolloutServicer(fleet, context.telemetry)
    async with contextlib.AsyncExitStack() as stack:
        remedy = "Stop it: two would take each other's engines out of the router, and write the same store."
        stack.enter_context(FolderLock(context.run_dir.rollout_store, service="rollout", remedy=remedy))
        stack.callback(rewards.close)
        stack.callback(hooks.close)
        server = await rpc.start_server(
            lambda grpc_server: rollout_pb2_grpc.add_RolloutServicer_to_server(servicer, grpc_server),
            names=(SERVICE,),
            host=config.run.host,
        )
        stack.push_async_callback(server.grpc.stop, 1.0)
        addresses.publish(context.run_dir, "rollout", grpc=server.address)
        budget_s = config.run.drain_budget_s / 3
        stack.push_async_callback(fleet.stop, budget_s)
        loading = asyncio.create_task(asyncio.to_thread(_load_all, config, tokenizer, limits), name="load-prompts")
        stack.callback(loading.cancel)
        await _start_engines(context, fleet)
        prompts, sets = await loading
        session = await stack.enter_async_context(_http_session(config))
        router = RouterLink(config, context.run_dir, fleet, session)
        stack.push_async_callback(router.close)
        await router.connect(config.run.start_timeout_s)
        keeping = context.watch(asyncio.create_task(router.keep(), name="router-link"))
        stack.push_async_callback(_end, keeping)
        generator = Generator(
            session, router, limits.vocab_size, config.rollout.rollout_request_timeout_s, tokenizer.decode
        )
        maker = GroupMaker(generator, rewards, config.rollout.rollout_max_in_flight)
        weights = WeightUpdates(config, fleet, router, session)
        stack.push_async_callback(weights.close)
        servicer.parts = _assemble(context, prompts, sets, maker, fleet, weights, hooks)
        stack.push_async_callback(servicer.parts.reporter.close)
        stack.push_async_callback(servicer.parts.batches.close)
        await server.set_serving(serving=True)
        yield
        servicer.draining = True
        await server.drain(budget_s)


def _assemble(
    context: ServiceContext,
    prompts: PromptSet,
    sets: dict[str, PromptSet],
    maker: GroupMaker,
    fleet: Fleet,
    weights: WeightUpdates,
    hooks: LogHooks,
) -> Parts:
    config = context.config
    unfinished = UnfinishedReports(context.run_dir.rollout_store / "reports")
    reporter, clock = Reporter(context.telemetry, hooks, unfinished), IdleClock()
    feed = PromptFeed(prompts, run_seed=config.run.seed, shuffle=config.rollout.rollout_shuffle)
    rollouts = TrainingRollouts(config, maker, fleet, weights, reporter, clock)
    assert config.run.rollout_batch_size is not None
    batches = Batches(
        BatchStore(context.run_dir.rollout_store),
        feed,
        batch_size=config.run.rollout_batch_size,
        settings=settings_fingerprint(config),
        make=rollouts.make,
        reports=BatchReports(reporter, feed),
    )
    weights.restart_versions(batches.first_rollout_id)
    if batches.is_restored:  # else it is not known what will be made anew until the trainer has restored it
        reporter.send_left_over(batches.will_report)
    context.telemetry.attempt = batches.attempt
    return Parts(batches, Evaluations(config, sets, maker, fleet, reporter, clock), weights, reporter)


async def _start_engines(context: ServiceContext, fleet: Fleet) -> None:
    try:
        for keeper in await fleet.start():
            context.watch(keeper)
    except EngineStartFailed as error:
        if not error.refused:  # killed, or too slow: the next start may go well
            raise NotReachable(f"an engine did not start: {error}") from error
        engine = context.config.rollout.rollout_engine
        remedy = f"Its whole output: {context.run_dir.log('engine-N').with_suffix('.out')}."
        raise ConfigError([Problem("rollout.rollout_engine", engine, f"did not start: {error}", remedy)]) from error


def _load_all(config: RunConfig, tokenizer: Tokenizer, limits: ModelLimits) -> tuple[PromptSet, dict[str, PromptSet]]:
    """The training prompts, and the evaluation sets by name."""
    data, evals = config.rollout.prompt_data, config.rollout.eval_prompt_data
    source = PromptSource.of(config, data, key="rollout.prompt_data", limits=limits)
    prompts = load_prompts(source, tokenizer)
    sets = {
        name: load_prompts(PromptSource.of(config, path, key="rollout.eval_prompt_data", limits=limits), tokenizer)
        for name, path in zip(evals[::2], evals[1::2], strict=True)
    }
    return prompts, sets


async def _end(task: "asyncio.Task[object]") -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task}, timeout=5.0)


def _http_session(config: RunConfig) -> aiohttp.ClientSession:
    """No proxies, no limit of its own (callers are bounded), answers of any size."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=router_tls(config))
    return aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=True)
