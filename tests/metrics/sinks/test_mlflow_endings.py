"""How a run ended is told to MLflow once it can be, whatever was away or started anew meanwhile."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from furlong.rundir import RunDir
from services.metrics.sinks.mlflow import MlflowSink
from services.metrics.sinks.process import SinkProcessFailed
from services.metrics.sinks.sink import Cursor, SinkContext, TakenInPart
from tests.metrics.running import part
from tests.metrics.stores import Store, store


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Store]:
    with store(tmp_path / "x.db") as opened:
        yield opened


def sink(tmp_path: Path, stored: Store) -> MlflowSink:
    context = SinkContext("mlflow", RunDir(tmp_path), tmp_path / "own", tmp_path / "log", 5.0, stored.reader)
    return MlflowSink("tests.metrics.sink_children.Ending", {}, context)


async def started_again(was: MlflowSink, stored: Store, tmp_path: Path, durable: Cursor) -> MlflowSink:
    await was.abort()
    again = sink(tmp_path, stored)
    await again.start(durable)
    return again


def told(tmp_path: Path) -> list[dict[str, str]]:
    path = tmp_path / "own" / "ended"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def row(run: str, step: int) -> bytes:
    return json.dumps(json.loads(part(step, {"train/loss": ["last", 1]})) | {"run": run}).encode()


def ended(run: str) -> bytes:
    return json.dumps({"event": "run_ended", "run": run, "exit_code": 0}).encode()


@pytest.mark.parametrize("when", ["tick", "finish"])
async def test_end_that_mlflow_did_not_take_is_told_after_a_restart(tmp_path: Path, stored: Store, when: str) -> None:
    stored.take(row("r", 1))
    first = sink(tmp_path, stored)
    await first.start(Cursor(0))
    cursor = await first.write(stored.reader.after(0, 9))
    stored.take(ended("r"))
    (tmp_path / "own" / "down").touch()
    with pytest.raises(SinkProcessFailed, match="down"):
        await getattr(first, when)()
    (tmp_path / "own" / "down").unlink()
    again = await started_again(first, stored, tmp_path, cursor)
    await again.finish()
    assert told(tmp_path) == [{"r": "FINISHED"}]
    third = await started_again(again, stored, tmp_path, cursor)
    await third.finish()
    assert len(told(tmp_path)) == 1


async def test_rows_are_taken_once_though_their_run_s_end_is_not(tmp_path: Path, stored: Store) -> None:
    stored.take(row("r", 1), ended("r"))
    first = sink(tmp_path, stored)
    await first.start(Cursor(0))
    (tmp_path / "own" / "down").touch()
    with pytest.raises(TakenInPart) as taken:
        await first.write(stored.reader.after(0, 9))
    assert taken.value.cursor == Cursor(1)
    await first.abort()


async def test_run_that_ends_without_a_row_since_a_restart_is_told(tmp_path: Path, stored: Store) -> None:
    stored.take(row("a", 1), row("b", 1))
    first = sink(tmp_path, stored)
    await first.start(Cursor(0))
    cursor = await first.write(stored.reader.after(0, 9))
    again = await started_again(first, stored, tmp_path, cursor)
    stored.take(row("b", 2))
    await again.write(stored.reader.after(cursor.row_id, 9))
    stored.take(ended("a"))
    await again.finish()
    assert told(tmp_path) == [{"a": "FINISHED"}]


async def test_end_of_a_run_waits_for_its_first_row(tmp_path: Path, stored: Store) -> None:
    stored.take(row("a", 1), ended("a"), row("b", 1), ended("b"), ended("none"))
    first = sink(tmp_path, stored)
    await first.start(Cursor(0))
    cursor = await first.write(stored.reader.after(0, 1))
    assert told(tmp_path) == [{"a": "FINISHED"}]
    again = await started_again(first, stored, tmp_path, cursor)
    await again.write(stored.reader.after(cursor.row_id, 9))
    await again.finish()
    assert told(tmp_path) == [{"a": "FINISHED"}, {"b": "FINISHED"}]
