"""Alerts are stored once and reach each target once, whoever else fails or ends meanwhile."""

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # Any: stands in for sinks of every kind

import orjson
import pytest

from furlong.alertrules import BUILT_IN
from furlong.alertrules.choice import Chosen
from furlong.jsonline import NO_SECRETS
from services.metrics.alerts import ledger
from services.metrics.alerts.alert import Alert, State
from services.metrics.alerts.engine import AlertEngine
from services.metrics.alerts.ledger import Ledger
from services.metrics.alerts.targets import FileTarget
from services.metrics.alerts.wandb_delivery import WandbDelivery
from services.metrics.intake import RecordsIn
from services.metrics.rows import RowReader
from services.metrics.writer import Writer
from tests.metrics.test_sink_task import until

LIMIT_S = 10.0


class Store:
    """A writer and a reader, and alerts to put in."""

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.db"
        self.writer = Writer(path, row_timeout_s=30, secrets=NO_SECRETS, on_death=lambda reason: None)
        self.writer.start()
        self.reader = RowReader(path)
        self.ledger = Ledger(self.reader)

    def put(self, *runs: str) -> None:
        """An alert that fires now, of each of the runs."""
        alerts = [Alert(run, "loss_spike", State.FIRING, "warning", "s", "r", time.time_ns() // 1000) for run in runs]
        self.writer.execute(lambda connection: ledger.write(connection, alerts, 0, None)).result(LIMIT_S)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = Store(tmp_path)
    yield made
    made.reader.close()
    made.writer.close(5.0)


class Wandb:
    """A wandb sink of one run; takes nothing while `is_away`."""

    def __init__(self, run: str, name: str = "wandb") -> None:
        self.run, self.name, self.is_away = run, f"{name}--{run}", False
        self.took: list[int] = []
        self.num_tries = 0

    async def alert(self, alert: Alert) -> None:
        if alert.run != self.run:
            return
        self.num_tries += 1
        if self.is_away:
            raise RuntimeError("the process is not running")
        self.took.append(alert.id)


async def delivering(store: Store, *sinks: Wandb, removed: Sequence[Wandb] = ()) -> WandbDelivery:
    """removed: those of sinks that are not at work; they may come back."""
    tasks: list[Any] = [
        SimpleNamespace(kind="wandb", sink=sink, source=SimpleNamespace(run=sink.run)) for sink in sinks
    ]
    at_work = lambda: [task for task in tasks if task.sink not in removed]  # noqa: E731 - asked again and again
    delivery = WandbDelivery(at_work, lambda: tasks, store.ledger, store.writer)
    await delivery.start()
    await until(lambda: store.ledger.position("wandb") is not None)  # what is put from now on is new
    return delivery


async def test_run_whose_wandb_is_away_holds_up_no_other_and_gets_its_alerts_later(store: Store) -> None:
    a, b = Wandb("a"), Wandb("b")
    a.is_away = True
    delivery = await delivering(store, a, b)
    store.put("a", "b")
    delivery.notify()
    await until(lambda: b.took == [2] and a.num_tries)
    await delivery.close(0.0)
    a.is_away = False
    again = await delivering(store, a, b)  # the service's next start
    await until(lambda: a.took == [1])
    await until(lambda: store.ledger.targets("wandb/") == [])  # nothing is kept of who has all
    await again.close(LIMIT_S)
    assert (a.took, b.took) == ([1], [2])


async def test_alert_of_a_run_whose_sink_was_removed_waits_until_it_is_restored(store: Store) -> None:
    sink = Wandb("a")
    removed = [sink]
    delivery = await delivering(store, sink, Wandb("b"), removed=removed)
    store.put("a")
    delivery.notify()
    await until(lambda: "wandb/a" in store.ledger.targets("wandb/"))
    removed.clear()
    await until(lambda: sink.took == [1])
    await delivery.close(LIMIT_S)


async def test_second_wandb_of_a_run_that_fails_has_nothing_repeated_in_the_first(store: Store) -> None:
    first, second = Wandb("a"), Wandb("a", "other")
    second.is_away = True
    delivery = await delivering(store, first, second)
    store.put("a", "a")
    delivery.notify()
    await until(lambda: second.num_tries)
    second.is_away = False
    await until(lambda: len(second.took) == 2)
    await delivery.close(LIMIT_S)
    assert first.took == second.took == [1, 2]


async def test_alerts_that_are_being_stored_when_the_service_ends_are_stored_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_sinks() -> list[Any]:
        return []

    execute, begun = store.writer.execute, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slowly(work: Callable[..., Any]) -> "Future[Any]":
        """On disk only once the end has been asked for."""
        done: Future[Any] = Future()
        loop.call_soon(begun.set)
        loop.call_later(0.1, lambda: execute(work).add_done_callback(lambda found: done.set_result(found.result())))
        return done

    chosen = Chosen(BUILT_IN, frozenset())
    engine = AlertEngine(chosen, own_run="r", reader=store.reader, writer=store.writer, sinks=no_sinks)
    record = {
        "event": "metrics",
        "run": "r",
        "axis": "train/step",
        "step": 1,
        "values": {"train/loss": ["last", "NaN"]},
    }
    store.writer.submit(RecordsIn("p", 1, 1, (orjson.dumps(record),))).result(LIMIT_S)
    monkeypatch.setattr(store.writer, "execute", slowly)
    running = asyncio.create_task(engine.run())
    await asyncio.wait_for(begun.wait(), LIMIT_S)
    await engine.close(running)
    assert [alert.rule for alert in store.ledger.after(0, 10)] == ["loss_nonfinite"]


async def test_line_that_a_full_disk_tore_is_ended_before_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, target = os.write, FileTarget(tmp_path / "alerts.jsonl")
    alert = Alert("r", "loss_spike", State.FIRING, "warning", "s", "r", 0, id=1)
    await target.send(alert)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:20]))
        with pytest.raises(OSError, match="20 of"):
            await target.send(dataclasses.replace(alert, id=2))
    await target.send(dataclasses.replace(alert, id=2))
    first, torn, second = (tmp_path / "alerts.jsonl").read_bytes().splitlines()
    assert (json.loads(first)["id"], json.loads(second)["id"], len(torn)) == (1, 2, 20)
