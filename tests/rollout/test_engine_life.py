"""Engines that die, and engines whose parent dies: nothing hangs, nothing is left running."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import grpc
import psutil
import pytest

from furlong.addresses import NotReachable
from furlong.config import ConfigError, RunConfig, to_toml
from furlong.process import ExitCode
from furlong.v1 import weights_pb2
from tests.processes import left_after
from tests.rollout.world import World, code_of, make_config, rollout_of, router_of, until, world

PROGRAM = (
    "import sys; from pathlib import Path; from furlong.config import load_resolved;"
    "from services.rollout.main import main;"
    "sys.exit(main(load_resolved(Path(sys.argv[1])), rank=0, foreground=False))"
)


async def is_generating(w: World) -> bool:
    return (await w.status()).phase == "generating"


async def test_generation_on_a_killed_engine_goes_on_elsewhere_with_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with world(make_config(tmp_path / "a", rollout_num_engines=2)) as w:
        whole, _ = await w.batch(0)
    async with world(make_config(tmp_path / "b", rollout_num_engines=2)) as w:
        await w.control_all(delay_s=0.5)
        batch = asyncio.ensure_future(w.batch(0))
        await until(lambda: is_generating(w))
        os.kill((await w.engines())[0].pid, signal.SIGKILL)
        groups, _ = await batch
        assert groups_without_cache(groups) == groups_without_cache(whole)


def groups_without_cache(groups: list) -> list:
    return [[(list(s.response_token_ids), s.reward, s.status) for s in g.samples] for g in groups]


async def test_the_last_engine_killed_fails_the_rollout_soon_and_says_why(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        await w.control(0, delay_s=60)
        batch = asyncio.ensure_future(code_of(w.batch(0)))
        await until(lambda: is_generating(w))
        started = time.monotonic()
        os.kill((await w.engines())[0].pid, signal.SIGKILL)
        code, words = await batch
        assert time.monotonic() - started < 5
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "engine-0" in words
        assert "status -9" in words


async def test_a_killed_engine_comes_back_with_the_next_update(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        [before] = await w.engines()
        os.kill(before.pid, signal.SIGKILL)

        async def is_back() -> bool:
            [now] = await w.engines()
            return now.state == weights_pb2.ENGINE_STATE_WAITING_FOR_WEIGHTS and now.pid != before.pid

        await until(is_back)
        await w.publish(0)
        groups, _ = await w.batch(0)
        assert len(groups) == 4


async def test_an_engine_that_does_not_start_is_told_with_its_output(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no such device')")
    config = make_config(tmp_path, sglang_launcher=str(broken))
    with pytest.raises(ConfigError, match="no such device"):
        async with router_of(config), rollout_of(config):
            pass


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "time.sleep(60)"])
async def test_an_engine_that_is_killed_or_late_at_its_start_is_no_fault_of_the_configuration(
    tmp_path: Path, ending: str
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(f"import os, time\n{ending}")
    config = make_config(tmp_path, sglang_launcher=str(broken))
    config = config.model_copy(update={"run": config.run.model_copy(update={"start_timeout_s": 2.0})})
    with pytest.raises(NotReachable, match=r"engine-0 (ended by SIGKILL|was not ready within 2 s)"):
        async with router_of(config), rollout_of(config):
            pass


async def test_after_the_drain_no_engine_is_left(tmp_path: Path) -> None:
    async with world(make_config(tmp_path, rollout_num_engines=2)) as w:
        pids = [engine.pid for engine in await w.engines()]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_engines_die_with_a_killed_rollout_service(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(config))
    service = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "config.toml")])
    try:
        output = tmp_path / "run/logs/engine-0.out"
        deadline = time.monotonic() + 20
        while not (output.exists() and output.read_text()):
            assert time.monotonic() < deadline
            assert service.poll() is None
            time.sleep(0.02)
        [engine] = psutil.Process(service.pid).children()
    finally:
        service.kill()
        service.wait(10)
    assert left_after([engine], within_s=5) == []


def test_rollout_imports_no_torch_and_no_transformers() -> None:
    program = "import sys, services.rollout.main; print(sorted({'torch', 'transformers', 'jinja2'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "[]"


async def test_a_restarted_router_is_found_again_and_told_of_the_engines(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with rollout_with_router_that_restarts(config) as (w, restart):
        first, _ = await w.batch(0)
        assert len(first) == 4
        await w.control(0, delay_s=0.2)
        batch = asyncio.ensure_future(w.batch(1, 0))
        await until(lambda: is_generating(w))
        await restart()
        groups, _ = await batch
        assert {s.error for g in groups for s in g.samples} == {""}


@contextlib.asynccontextmanager
async def rollout_with_router_that_restarts(
    config: RunConfig,
) -> AsyncGenerator[tuple[World, Callable[[], Awaitable[None]]]]:
    async with contextlib.AsyncExitStack() as routers:
        await routers.enter_async_context(router_of(config))
        async with rollout_of(config) as w:
            await w.restore()
            await w.publish(0)

            async def restart() -> None:
                await routers.aclose()
                await routers.enter_async_context(router_of(config))

            yield w, restart


async def test_the_environments_proxies_are_ignored_also_over_ipv6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with world(make_config(tmp_path, run={"host": "::1"})) as w:
        groups, _ = await w.batch(0)
        assert len(groups) == 4
        assert (await w.engines())[0].url.startswith("http://[::1]:")


def test_a_stop_while_starting_is_quick_and_leaves_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)  # there is no router: it waits for one
    (tmp_path / "config.toml").write_text(to_toml(config))
    service = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "config.toml")])
    try:
        output = tmp_path / "run/logs/engine-0.out"
        deadline = time.monotonic() + 20
        while not (output.exists() and output.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        family = psutil.Process(service.pid).children(recursive=True)
        service.terminate()
        assert service.wait(10) == ExitCode.DRAINED
    finally:
        service.kill()
        service.wait(10)
    assert left_after(family, within_s=1) == []
