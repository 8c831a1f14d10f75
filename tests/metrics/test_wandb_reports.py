"""What went wrong in wandb for users of systems like ours, each as a test; the offline file is what is read back."""

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from furlong.config import RunConfig
from furlong.config.sections import MetricsSection, RunSection
from services.metrics.sinks.flags import specs_of
from services.metrics.sinks.wandb_names import Names
from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.wandb_file import OfflineRun, read_runs

Make = Callable[..., MetricsProcess]


def offline(make: Make, **options: object) -> MetricsProcess:
    return make(use_wandb=True, wandb_mode="offline", **options).start()


def curve(run: OfflineRun, name: str, axis: str) -> list[tuple[int, float]]:
    return [(point[axis], point[name]) for point in run.points if name in point]


NON_FINITE: list[Any] = ["NaN", "NaN", 1.0, "Infinity", "-Infinity"]
ON_AXES = {
    "train/a": "train/step",
    "perf/a": "rollout/step",
    "multi_turn/a": "rollout/step",
    "passrate/pass@2": "rollout/step",
    "eval/set": "eval/step",
    "engine/e-0/queue": "engine/time",
    "profiling/a": "my/clock",
}
SECRET = "hunter2hunter2"
HUSHED = "http://u:HUSH@127.0.0.1:2/HUSH?k=HUSH"


def records() -> list[bytes]:
    """Of one run, of several producers and axes, in no order."""
    given = [part(n, {"train/loss": ["last", n]}) for n in range(1, 162)]
    for n in (9, 2, 7, 1):  # steps that jump back and forth, axes in turn
        given += [part(1000 + n, {name: ["last", n]}, axis=axis, rank=str(n)) for name, axis in ON_AXES.items()]
    given += [part(2000 + n, {"train/x": ["last", value]}) for n, value in enumerate(NON_FINITE)]
    histogram, table = ["histogram", [0, 1, 2], [3, 4]], ["table", ["prompt", "reward"], [["a", 1], ["b", None]]]
    given.append(part(3000, {"rollout/lengths": histogram, "rollout/samples": table}, axis="rollout/step"))
    return given


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfflineRun]:
    """A run that logs to step 161, resumes at 110 and goes on to 200; read back from its one file."""
    service = MetricsProcess(
        tmp_path_factory.mktemp("wandb"), environment={"SOME_TOKEN": SECRET}, use_wandb=True, wandb_mode="offline",
        wandb_run_name=f"named-{SECRET}", metrics_row_timeout_s=1.0, alert_webhook=HUSHED,
    ).start()  # fmt: skip
    for rank in range(4):
        ranks = [str(other) for other in range(4)]
        mean = part(1, {"eval/mean": ["mean", rank, 1]}, axis="eval/step", part=str(rank), parts=ranks)
        send(service, batch([mean], producer=f"r/trainer-{rank}"))
    half = part(5, {"eval/early": ["last", 1]}, axis="eval/step", part="a", parts=("a", "b"))
    given = [half, *records()]
    send(service, batch(given))
    until(lambda: any("eval/early" in row["values"] for row in service.rows()), "the incomplete row")
    service.flush()
    other_half = part(5, {"eval/late": ["last", 2]}, axis="eval/step", part="b", parts=("a", "b"))
    second = [part(n, {"train/loss": ["last", -n]}, attempt=2) for n in range(110, 201)]
    send(service, batch([other_half, *second], first=len(given) + 1))
    service.stop()
    (found,) = read_runs(service.run_dir.root)
    yield found
    service.end()


def test_resume_behind_the_last_step_is_one_whole_curve(run: OfflineRun) -> None:
    """Nothing is dropped, and of a step the newest point counts, which says its attempt."""
    points = curve(run, "train/loss", "train/step")
    assert points[:161] == [(n, n) for n in range(1, 162)]
    assert points[161:] == [(n, -n) for n in range(110, 201)]
    shown = dict(points)
    assert [shown[n] for n in range(1, 201)] == [*range(1, 110), *(-n for n in range(110, 201))]
    attempts = {point["train/step"]: point["train/attempt"] for point in run.points if "train/loss" in point}
    assert attempts[109] == 1 and attempts[110] == attempts[200] == 2
    assert run.steps == sorted(set(run.steps))  # wandb's own step only rises: it drops nothing


@pytest.mark.parametrize("name", ON_AXES)
def test_no_record_of_any_axis_is_dropped_whatever_their_order(run: OfflineRun, name: str) -> None:
    axis = ON_AXES[name]
    assert sorted(curve(run, name, axis)) == [(1000 + n, n) for n in (1, 2, 7, 9)]
    assert run.axes.get(f"{name.split('/')[0]}/*", run.axes.get(name)) == axis


def test_nan_is_shown_as_such_and_counted(run: OfflineRun) -> None:
    found = [value for _, value in curve(run, "train/x", "train/step")]
    assert [math.isnan(value) for value in found] == [True, True, False, False, False]
    assert found[3:] == [math.inf, -math.inf]
    assert curve(run, "train/x/nonfinite", "train/step") == [(2000 + n, 1) for n in (0, 1, 3, 4)]


def test_many_producers_and_ranks_make_one_run(run: OfflineRun) -> None:
    assert curve(run, "eval/mean", "eval/step") == [(1, 1.5)]


def test_late_part_of_a_row_arrives_and_the_early_one_is_not_repeated(run: OfflineRun) -> None:
    assert curve(run, "eval/early", "eval/step") == [(5, 1)]
    assert curve(run, "eval/late", "eval/step") == [(5, 2)]


def test_histograms_and_tables_are_wandbs_own(run: OfflineRun) -> None:
    (point,) = [point for point in run.points if "rollout/lengths/_type" in point]
    assert (point["rollout/lengths/_type"], point["rollout/lengths/values"]) == ("histogram", [3, 4])
    assert (point["rollout/samples/_type"], point["rollout/samples/nrows"]) == ("table-file", 2)


def test_config_is_whole_and_names_no_secret(run: OfflineRun) -> None:
    assert run.config["run"]["name"] == "r"
    assert run.config["trainer"]["lr"] == RunConfig().trainer.lr
    assert run.config["metrics"]["wandb_run_name"] == "named-[redacted]"
    assert run.config["metrics"]["alert_webhook"] == "http://127.0.0.1:2"
    assert "HUSH" not in str(run.config)


def test_run_of_a_child_process_is_finished(run: OfflineRun) -> None:
    assert run.finished


def test_row_that_a_newer_attempt_has_replaced_is_not_drawn_any_more(make: Make) -> None:
    service = make(use_wandb=False).start()
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in (1, 2, 3)]))
    send(service, batch([part(2, {"train/loss": ["last", -2]}, attempt=2)], first=4))
    service.flush()
    service.stop()
    late = make(use_wandb=True, wandb_mode="offline").start()  # added late: it sees what is current
    send(late, batch([part(3, {"train/loss": ["last", -3]}, attempt=2)], first=5))
    late.stop()
    (run,) = read_runs(late.run_dir.root)
    assert curve(run, "train/loss", "train/step") == [(1, 1), (2, -2), (3, -3)]


@pytest.mark.parametrize("victim", ["everything", pytest.param("sink", marks=pytest.mark.slow)])
def test_offline_run_has_each_row_once_though_processes_are_killed(make: Make, victim: str) -> None:
    service = offline(make)
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(1, 31)]))
    service.flush()
    assert service.process is not None
    family = psutil.Process(service.process.pid).children(recursive=True)
    if victim == "everything":
        service.kill()
    for process in family:
        with contextlib.suppress(ProcessLookupError):  # it may have finished by itself
            os.kill(process.pid, signal.SIGKILL)
    if victim == "everything":
        service.start()
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(31, 41)], first=31))
    service.flush()
    service.stop()
    steps = [step for run in read_runs(service.run_dir.root) for step, _ in curve(run, "train/loss", "train/step")]
    assert steps == list(range(1, 41))


@pytest.mark.slow
def test_service_alone_makes_one_run_for_each(make: Make) -> None:
    service = make(environment={"TEST_ALONE": "1"}, use_wandb=True, wandb_mode="offline").start()
    for name in ("one", "two", "one/../three"):
        record = {"run": name, "event": "metrics", "axis": "train/step", "step": 1, "values": {"train/loss": 1}}
        send(service, batch([orjson.dumps(record)], producer=f"{name}/x"))
    until(lambda: len(read_runs(service.run_dir.root)) == 3, "three runs of wandb's")
    service.stop()
    runs = read_runs(service.run_dir.root)
    assert {run.config["run"]["name"] for run in runs} == {"one", "two", "one/../three"}
    assert {path.name for path in service.run_dir.metrics_store.glob("sinks/*")} >= {"wandb--one", "wandb--two"}
    assert len(list(service.run_dir.metrics_store.glob("sinks/*"))) == 3
    assert all(curve(run, "train/loss", "train/step") == [(1, 1)] for run in runs)


def test_disabled_is_no_sink_at_all() -> None:
    config = RunConfig(run=RunSection(name="r"), metrics=MetricsSection(use_wandb=True, wandb_mode="disabled"))
    assert [spec.kind for spec in specs_of(config, {})] == ["jsonl"]


def test_wandb_is_not_imported_by_the_service() -> None:
    code = "import sys, services.metrics.main, services.metrics.sinks.wandb_sink; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False, cwd=Path.cwd()).returncode == 0


def test_names_are_told_apart_and_mean_the_same_for_ever() -> None:
    names = Names()
    assert names.shown("train/a.b", "train/step") == "train/a.b"
    assert names.shown("train/a/b", "train/step") == "train/a/b"  # wandb keeps both as they are
    assert names.shown("train/loss", "rollout/step") == "@rollout/step/train/loss"
    assert names.shown("loss", "train/step") == "loss"
    assert names.shown("loss", "eval/step") == "@eval/step/loss"
    assert names.shown("_step", "train/step") == "@raw/_step"
    assert names.shown("train/step", "train/step") == "@raw/train/step"
    assert names.shown("train/attempt", "train/step") == "@raw/train/attempt"
    again = Names(other=dict(names.other))
    assert again.shown("loss", "eval/step") == "@eval/step/loss"


def test_every_name_has_its_axis() -> None:
    names = Names()
    for name, axis in (("train/x/nonfinite", "train/step"), ("train/loss", "rollout/step"), ("loss", "my/clock")):
        shown = names.shown(name, axis)
        by_glob = dict(names.globs()).get(f"{shown.split('/')[0]}/*")
        assert by_glob == axis or names.undefined(shown, axis)
        assert not names.undefined(shown, axis)  # said once
