"""Rollout and its router: who is confirmed, what happens when the router is away, comes back, or wants a token."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import pytest
import structlog.testing

from furlong.addresses import NotReachable
from furlong.config import RunConfig
from furlong.rundir import RunDir
from furlong.v1 import sample_pb2, weights_pb2
from services.rollout import router_link
from services.rollout.router_calls import RouterCalls
from services.router.main import Listening
from services.router.workers.workers import State
from tests.rollout.world import World, make_config, rollout_of, router_of, until

READY, WAITING = weights_pb2.ENGINE_STATE_READY, weights_pb2.ENGINE_STATE_WAITING_FOR_WEIGHTS


@contextlib.asynccontextmanager
async def serving(config: RunConfig) -> AsyncGenerator[tuple[World, Listening]]:
    async with router_of(config) as router, rollout_of(config) as w:
        await w.restore()
        await w.publish(0)
        yield w, router


def state(router: Listening) -> tuple[State, int | None]:
    """Of the one worker."""
    (worker,) = router.router.workers.all()
    return worker.state, worker.policy_version


async def test_engines_are_registered_with_labels(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout_num_engines=2)
    async with serving(config) as (_, router):
        labels = [dict(worker.labels) for worker in router.router.workers.all()]
        assert [one["engine"] for one in labels] == ["engine-0", "engine-1"]
        assert {(one["run"], one["owner"]) for one in labels} == {
            ("run", router_link.owner_of(RunDir(Path(config.run.run_dir))))
        }


async def test_a_worker_that_the_router_saw_die_is_confirmed_at_once_when_it_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "SYNC_INTERVAL_S", 60.0)  # so that it can only be the stream of changes
    async with serving(make_config(tmp_path)) as (_, router):
        await until(lambda: state(router) == (State.READY, 0))
        workers = router.router.workers
        workers.gone(workers.all()[0], "refused")
        assert state(router)[1] is None
        await until(lambda: state(router) == (State.READY, 0), limit_s=5.0)


async def test_an_engine_that_holds_another_version_is_never_confirmed(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path)) as (w, router):
        await w.control(0, version="7")
        workers = router.router.workers
        workers.gone(workers.all()[0], "refused")
        await until(lambda: is_waiting(w))
        assert state(router)[1] is None
        assert workers.num_ready() == 0


async def is_waiting(w: World) -> bool:
    return [engine.state for engine in await w.engines()] == [WAITING]


async def test_what_an_engine_with_other_weights_answered_is_asked_of_another(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path / "sound", rollout_num_engines=2)) as (w, _):
        sound = samples((await w.batch(0))[0])
    async with serving(make_config(tmp_path / "changed", rollout_num_engines=2)) as (w, _):
        await w.control(0, version="7")  # behind our back, as one that took its port would be
        assert samples((await w.batch(0))[0]) == sound
        assert [engine.state for engine in await w.engines()] == [WAITING, READY]


async def test_an_engine_that_cannot_be_asked_gets_nothing_until_it_can(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path)) as (w, router):
        await w.control(0, broken={"/model_info": 500})
        workers = router.router.workers
        workers.gone(workers.all()[0], "refused")
        await until(lambda: workers.all()[0].life.name == "UP")
        told: list[int | None] = [worker.policy_version for worker in workers.all()]
        assert told == [None] and workers.num_ready() == 0
        assert [engine.state for engine in await w.engines()] == [READY]
        await w.control(0, broken={})
        await until(lambda: state(router) == (State.READY, 0))


async def test_engines_of_an_earlier_start_are_taken_out(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with router_of(config) as router:
        owner = router_link.owner_of(RunDir(Path(config.run.run_dir)))
        old, others = "http://127.0.0.1:1", "http://127.0.0.1:2"
        router.router.add(old, admit=False, labels={"owner": owner, "engine": "engine-0"})
        router.router.add(others, admit=False, labels={"owner": "another", "engine": "engine-0"})
        async with rollout_of(config) as w:
            urls = [str(worker.url) for worker in router.router.workers.all()]
            assert urls == [others, (await w.engines())[0].url]


def with_router(config: RunConfig, **router: object) -> RunConfig:
    return config.model_copy(update={"router": config.router.model_copy(update=router)})


async def test_a_token_is_given_and_may_be_changed(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with serving(with_router(make_config(tmp_path), router_token_file=str(token))) as (w, router):
        assert len((await w.batch(0))[0]) == 4
        token.write_text("second, which is longer".replace(" ", "-"))
        workers = router.router.workers
        workers.gone(workers.all()[0], "refused")
        await until(lambda: state(router) == (State.READY, 0))


async def test_a_wrong_token_is_told_at_once(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("right")
    wrong.write_text("wrong")
    async with router_of(with_router(config, router_token_file=str(right))):
        began = time.monotonic()
        with pytest.raises(NotReachable, match=r"refuses calls with the token in .*wrong"):
            async with rollout_of(with_router(config, router_token_file=str(wrong))):
                pass
        assert time.monotonic() - began < 10


async def test_a_router_that_comes_back_with_another_token_is_told_of(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    token = tmp_path / "token"
    token.write_text("another")
    with structlog.testing.capture_logs() as logs:
        async with contextlib.AsyncExitStack() as stack:
            async with router_of(config):
                await stack.enter_async_context(rollout_of(config))
            await until(lambda: "no live router" in lost(logs))
            await stack.enter_async_context(router_of(with_router(config, router_token_file=str(token))))
            await until(lambda: "refuses calls with no token" in lost(logs))


def lost(logs: Sequence[Mapping[str, object]]) -> str:
    return " ".join(str(entry["error"]) for entry in logs if entry["event"] == "router_lost")


async def test_the_batch_is_the_same_when_the_router_dies_under_it_again_and_again(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path / "unbroken", rollout_num_engines=2)) as (w, _):
        unbroken = samples((await w.batch(0))[0])
    config = make_config(tmp_path / "broken", rollout_num_engines=2)
    async with contextlib.AsyncExitStack() as routers:
        await routers.enter_async_context(router_of(config, drain_s=0.05))
        async with rollout_of(config) as w:
            await w.restore()
            await w.publish(0)
            await w.control_all(delay_s=0.3)
            batch = asyncio.ensure_future(w.batch(0))
            for _ in range(2):
                await until(functools.partial(more_than, w, await num_asked(w)))
                await routers.aclose()
                await routers.enter_async_context(router_of(config, drain_s=0.05))
            assert samples((await batch)[0]) == unbroken
    assert len(unbroken) == len({(group, index) for group, index, _ in unbroken}) == 8


def samples(groups: list[sample_pb2.Group]) -> list[tuple[int, int, str]]:
    return [(group.group_index, sample.index, sample.response) for group in groups for sample in group.samples]


async def num_asked(w: World) -> int:
    return sum([len(await w.seen(index, "/generate")) for index in range(2)])


async def more_than(w: World, num: int) -> bool:
    return await num_asked(w) > num


async def test_what_is_read_of_an_address_elsewhere(tmp_path: Path) -> None:
    config = with_router(make_config(tmp_path), router_addr="https://r.example:443/,r.example:444")
    calls = RouterCalls(config, RunDir(tmp_path))
    assert await calls.find() and not await calls.find()
    assert calls.place is not None and (calls.place.http, calls.place.grpc) == (
        "https://r.example:443",
        "r.example:444",
    )
    await calls.close()
