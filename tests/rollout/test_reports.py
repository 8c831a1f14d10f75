"""Each rollout and evaluation is reported once an attempt, whenever the service is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from furlong.records import Last
from furlong.rundir import RunDir
from furlong.telemetry import Telemetry
from furlong.v1 import rollout_pb2
from services.rollout.batch_store import BatchStore, KeptBatch
from services.rollout.flags import flags_of
from services.rollout.log_hooks import LogHooks
from services.rollout.reporting import Reporter
from services.rollout.unfinished_reports import UnfinishedReports
from tests.metrics.running import MetricsProcess
from tests.rollout.world import World, code_of, make_config, rollout_of, router_of, until, world, write_lines

LIMIT_S = 20.0


def never_arrives(timeout_s: float) -> bool:
    """In place of a flush: the service is killed before its records are on their way."""
    return False


def patch_write(monkeypatch: pytest.MonkeyPatch, before: Callable[[KeptBatch], object]) -> None:
    """Have something happen before a batch is on disk."""
    real = BatchStore.write

    def write(self: BatchStore, batch: KeptBatch) -> None:
        before(batch)
        real(self, batch)

    monkeypatch.setattr(BatchStore, "write", write)


def failing(times: int) -> Callable[[KeptBatch], None]:
    left = iter(range(times))

    def fail(batch: KeptBatch) -> None:
        if next(left, None) is not None:
            raise OSError(28, "No space left on device")

    return fail


async def begun(w: World) -> World:
    await w.restore()
    await w.publish(0)
    return w


async def test_a_rollout_whose_report_was_lost_in_a_kill_is_reported_by_the_next_start(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with router_of(config):
        async with rollout_of(config) as w:
            w.telemetry.flush = never_arrives  # type: ignore[method-assign]
            await (await begun(w)).batch(0)
            lost = w.telemetry.rows
        async with rollout_of(config) as w:
            assert w.telemetry.rows == lost and len(lost) == 1
            _, summary = await (await begun(w)).batch(0)
            assert summary.repeated_answer and len(w.telemetry.rows) == 1


async def test_what_surely_arrived_is_not_reported_by_the_next_start(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with router_of(config):
        async with rollout_of(config) as w:
            await (await begun(w)).batch(0)
        async with rollout_of(config) as w:
            await (await begun(w)).batch(0)
            assert w.telemetry.rows == []


async def test_a_rollout_that_could_not_be_kept_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_write(monkeypatch, failing(1))
    async with world(make_config(tmp_path)) as w:
        await code_of(w.batch(0))
        await w.batch(0)
        assert len(w.telemetry.rows) == 1


async def test_a_rollout_noted_but_not_kept_is_reported_as_it_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    patch_write(monkeypatch, failing(1))
    async with router_of(config):
        async with rollout_of(config) as w:
            await code_of((await begun(w)).batch(0))
        assert len(list((w.run_dir.rollout_store / "reports").iterdir())) == 1
        async with rollout_of(config) as w:
            assert (await begun(w)).telemetry.rows == []
            await w.batch(0)
            assert len(w.telemetry.rows) == 1


async def test_without_a_journal_left_over_reports_wait_for_the_restore(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with router_of(config):
        async with rollout_of(config) as w:
            w.telemetry.flush = never_arrives  # type: ignore[method-assign]
            await (await begun(w)).batch(0)
            lost = w.telemetry.rows
        (w.run_dir.rollout_store / "journal.json").unlink()
        async with rollout_of(config) as w:
            assert w.telemetry.rows == []
            await w.restore(None, 0, 2)
            assert w.telemetry.rows == lost  # of the attempt before


async def test_a_restore_while_a_batch_is_written_leaves_it_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    patch_write(monkeypatch, lambda batch: (writing.set(), go_on.wait(LIMIT_S)))
    async with world(make_config(tmp_path)) as w:
        first = asyncio.ensure_future(w.batch(0))
        await asyncio.to_thread(writing.wait, LIMIT_S)
        restoring = asyncio.ensure_future(w.restore())
        asyncio.get_running_loop().call_later(0.2, go_on.set)
        await restoring
        await asyncio.wait({first})
        _, summary = await w.batch(0)
        assert summary.repeated_answer and len(w.telemetry.rows) == 1


async def test_a_restore_that_a_slow_disk_holds_up_is_to_be_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    patch_write(monkeypatch, lambda batch: (writing.set(), go_on.wait(LIMIT_S)))
    monkeypatch.setattr("services.rollout.batches.RESTORE_LIMIT_S", 0.1)
    async with world(make_config(tmp_path)) as w:
        first = asyncio.ensure_future(w.batch(0))
        await asyncio.to_thread(writing.wait, LIMIT_S)
        code, words = await code_of(w.restore())
        go_on.set()
        await first
        assert code == grpc.StatusCode.UNAVAILABLE and "rollout-0 did not end" in words


async def test_a_later_attempt_reports_once_however_often_it_asks_and_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(make_config(tmp_path)) as w:
        await w.batch(0)
        await w.restore(None, 0, 2)
        threads: list[threading.Thread] = []
        patch_write(monkeypatch, lambda batch: threads.append(threading.current_thread()))
        answers = await asyncio.gather(*(w.batch(0) for _ in range(3)))
        assert all(summary.repeated_answer for _, summary in answers)
        assert [attempt for *_, attempt in w.telemetry.rows] == [1, 2]
        assert len(threads) == 1 and threads[0] is not threading.main_thread()


@pytest.fixture
def evaluated(tmp_path: Path) -> Iterator[dict[str, Any]]:
    data = write_lines(tmp_path / "eval.jsonl", [{"prompt": "abc", "label": "x"}] * 2)
    yield {"eval_prompt_data": ("s", str(data))}


async def evaluate(w: World, version: int) -> None:
    await w.stub.Evaluate(rollout_pb2.EvaluateRequest(rollout_id=4, policy_version=version), timeout=LIMIT_S)


async def test_an_evaluation_that_ends_well_after_all_was_not_skipped(
    tmp_path: Path, evaluated: dict[str, Any]
) -> None:
    async with world(make_config(tmp_path, **evaluated)) as w:
        await code_of(evaluate(w, 7))  # no engine holds it
        await w.restore()  # as the trainer does before it asks again
        await w.publish(0)
        await evaluate(w, 0)
    [(axis, step, values, _)] = w.telemetry.rows
    assert (axis, step) == ("eval/step", 4) and "eval/s" in values
    assert not any("skipped" in name for name in values)


async def test_an_evaluation_that_another_attempt_gives_up_was_skipped(
    tmp_path: Path, evaluated: dict[str, Any]
) -> None:
    async with world(make_config(tmp_path, **evaluated)) as w:
        await code_of(evaluate(w, 7))
        assert w.telemetry.rows == []
        await w.restore(None, 0, 2)
        assert w.telemetry.rows == [("eval/step", 4, {"eval/skipped_engine_lost": Last(1)}, 1)]


async def test_an_evaluation_whose_report_was_lost_in_a_kill_counts_once_when_asked_again(
    tmp_path: Path, evaluated: dict[str, Any]
) -> None:
    config = make_config(tmp_path, **evaluated)
    async with router_of(config):
        async with rollout_of(config) as w:
            w.telemetry.flush = never_arrives  # type: ignore[method-assign]
            await evaluate(await begun(w), 0)
            lost = w.telemetry.rows
        async with rollout_of(config) as w:
            await evaluate(await begun(w), 0)
            assert w.telemetry.rows == lost and len(lost) == 1


KILLED_AFTER_REPORTING = """
import asyncio, os, signal, sys
from pathlib import Path
from typing import Any
from furlong.records import Mean, Sum
from tests.rollout.test_reports import reporter_of

async def report():
    reporter, telemetry = reporter_of(Path(sys.argv[1]), Path(sys.argv[2]))
    values = {"rollout/raw_reward": Mean(8.0, 4), "rollout/num_failed": Sum(3)}
    given = reporter.rollout_report(5, values, attempt=1)
    reporter.note_rollout(given)
    reporter.report_rollout(given, samples=list, rollout_time_s=1.0)
    if sys.argv[3] == "arrived":
        assert telemetry.flush(10.0)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(report())
"""


def reporter_of(root: Path, run_dir: Path) -> tuple[Reporter, Telemetry]:
    """Of a rollout service that ships to the run's metrics service."""
    config = make_config(root, run={"name": "r", "run_dir": str(run_dir)})
    telemetry = Telemetry.for_run(config, RunDir(run_dir), service="rollout", instance="rollout")
    hooks = LogHooks(config, flags_of(config))
    return Reporter(telemetry, hooks, UnfinishedReports(run_dir / "reports")), telemetry


@pytest.mark.parametrize("before_the_kill", ["arrived", "lost"])
async def test_what_a_killed_start_and_the_next_one_report_counts_once(tmp_path: Path, before_the_kill: str) -> None:
    service = MetricsProcess(tmp_path).start()
    try:
        arguments = [str(tmp_path), str(service.run_dir.root), before_the_kill]
        command = [sys.executable, "-c", KILLED_AFTER_REPORTING, *arguments]
        killed = await asyncio.to_thread(subprocess.run, command, timeout=60, check=False, env=os.environ)
        assert killed.returncode == -signal.SIGKILL
        reporter, telemetry = reporter_of(tmp_path, service.run_dir.root)
        reporter.send_left_over(lambda rollout_id, attempt: False)
        telemetry.metrics("rollout/step", 5, {}, part="trainer", parts=["rollout", "trainer"])
        assert await asyncio.to_thread(telemetry.flush, LIMIT_S)
        await reporter.close()
        service.flush()
        await until(service.rows)
        [row] = service.rows()
        assert row["values"] == {"rollout/num_failed": 3, "rollout/raw_reward": 2.0}
        assert list((service.run_dir.root / "reports").iterdir()) == []
        telemetry.close(1.0)
    finally:
        service.end()
