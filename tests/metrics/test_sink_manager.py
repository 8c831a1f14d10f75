"""Sinks that come while others start, and those that come too late."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from furlong.config import ConfigError, RunConfig
from furlong.config.sections import RunSection
from furlong.jsonline import NO_SECRETS
from furlong.rundir import RunDir
from services.metrics import parts as parts_module
from services.metrics.bell import News
from services.metrics.sinks import manager as manager_module
from services.metrics.sinks.manager import SinkManager
from services.metrics.sinks.sink import SinkSpec
from tests.metrics.stores import Store, store


@pytest.fixture
async def new(tmp_path: Path) -> AsyncIterator[Store]:
    with store(tmp_path / "m.db") as opened:
        yield opened


def managing(of: Store, tmp_path: Path) -> SinkManager:
    run_dir = RunDir(tmp_path / "run").create()
    config = RunConfig(run=RunSection(name="r", run_dir=str(run_dir.root)))
    return SinkManager(
        run_dir=run_dir, reader=of.reader, writer=of.writer, config=config, secrets=NO_SECRETS, own_run=None
    )


async def test_nothing_is_added_or_restored_once_the_service_stops(new: Store, tmp_path: Path) -> None:
    sinks = managing(new, tmp_path)
    await sinks.start([SinkSpec("jsonl", "jsonl")])
    await sinks.remove("jsonl")
    await sinks.close(5.0)
    for late in (sinks.add(SinkSpec("copy", "jsonl", {"path": "copy.jsonl"})), sinks.restore("jsonl")):
        with pytest.raises(ConfigError, match="the service stops"):
            await late
    assert list(sinks) == []


async def test_run_that_comes_while_those_of_others_begin_gets_its_sink_without_more_news(
    new: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "LOOK_FOR_RUNS_S", 0.01)
    sinks, begun = managing(new, tmp_path), asyncio.Event()
    looks: list[set[str]] = []

    async def begin_runs() -> None:
        looks.append(set(sinks._unseen))
        if len(looks) == 1:  # what came after the store was read
            sinks.notify(News({"b"}, 2))
        else:
            begun.set()

    await sinks.start([SinkSpec("wandb", "wandb", {"mode": "offline"})])
    monkeypatch.setattr(sinks, "_begin_runs", begin_runs)
    sinks.notify(News({"a"}, 1))
    await asyncio.wait_for(begun.wait(), 10)
    assert looks == [{"a"}, {"b"}]
    await sinks.close(5.0)


async def test_what_comes_while_sinks_start_is_news_to_those_that_have(tmp_path: Path) -> None:
    told: list[News] = []

    class Starting:
        notify = told.append

        async def start(self, specs: object) -> None:
            for act in parts.on_news:
                act(News({"r"}, 1))

        async def close(self, timeout_s: float) -> None:
            pass

    config = RunConfig(run=RunSection(name="r", run_dir=str(tmp_path)))
    parts: Any = SimpleNamespace(
        sinks=Starting(), on_news=[], context=SimpleNamespace(config=config), left_s=lambda: 1.0
    )
    async with parts_module._sinks(parts):
        assert [news.last_row_id for news in told] == [1]
