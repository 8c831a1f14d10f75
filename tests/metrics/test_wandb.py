"""The wandb sink: with wandb itself, offline, and with a stand-in that raises and hangs."""

import json
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.metrics.sinks.flags import wandb_mode as choose_mode
from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.wandb_file import read_runs

Make = Callable[..., MetricsProcess]


def without(point: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in point.items() if name not in names}


def test_run_is_one_over_a_restart_and_each_value_is_over_its_axis(make: Make) -> None:
    service = make(use_wandb=True, wandb_project="p", wandb_group="g").start()
    axis = {"axis": "rollout/step"}
    send(service, batch([part(7, {"train/loss": ["mean", 1, 2], "train/x": ["last", "NaN"]}, rollout_id=2)]))
    send(service, batch([part(2, {"perf/a": ["last", 1], "rollout/b": ["sum", 2]}, **axis)], first=2))
    service.flush()
    assert service.stop() == 3
    service.start()
    send(service, batch([part(1, {"eval/x": ["last", 3]}, axis="eval/step")], first=3))
    service.flush()
    assert service.stop() == 3
    first, second = read_runs(service.run_dir.root)
    assert first.run_id == second.run_id != ""
    assert first.finished and second.finished
    train, rollout = first.points
    assert math.isnan(train.pop("train/x"))
    assert without(train, "train/attempt") == {
        "train/step": 7,
        "train/loss": 0.5,
        "train/x/nonfinite": 1,
        "train/rollout_id": 2,
    }
    assert without(rollout, "rollout/attempt") == {"rollout/step": 2, "perf/a": 1, "rollout/b": 2}
    assert [without(point, "eval/attempt") for point in second.points] == [{"eval/step": 1, "eval/x": 3}]
    prefixes = {"train": "train", "eval": "eval"} | dict.fromkeys(
        ("rollout", "perf", "multi_turn", "passrate"), "rollout"
    )
    assert first.axes == {f"{prefix}/*": f"{over}/step" for prefix, over in prefixes.items()} | {
        "engine/*": "engine/time",
        "router/*": "router/time",
    }


@pytest.mark.slow
def test_killed_service_leaves_no_gap_in_wandb(make: Make) -> None:
    service = make(use_wandb=True).start()
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(1, 101)]))
    service.flush()
    service.kill()
    service.start()
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(101, 151)], first=101))
    service.flush()
    service.stop()
    runs = read_runs(service.run_dir.root)
    assert len({run.run_id for run in runs}) == 1
    assert [point["train/step"] for run in runs for point in run.points] == list(range(1, 151))


def test_secret_is_nowhere(make: Make) -> None:
    secret = "SECRET123" + "x" * 31
    service = make(use_wandb=True, wandb_mode="offline", environment={"WANDB_API_KEY": secret}).start()
    record = b'{"event": "x", "text": "my key is %s"}' % secret.encode()
    send(service, batch([record, part(1, {"train/loss": ["last", 1]})]))
    service.flush()
    assert service.process is not None
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=10, check=True).stdout
    assert "SECRET123" not in found
    service.stop()
    files = [path for path in service.run_dir.root.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".wandb"]) == 1
    assert [path.name for path in files if b"SECRET123" in path.read_bytes()] == []


STAND_IN = """
import json, os, subprocess, time
from pathlib import Path
state = Path(os.environ["STAND_IN"])
def said(word): return (state / word).exists()
def once(word):
    if said(word):
        (state / word).unlink()
        return True
    return False
class Settings:
    def __init__(self, **kw): pass
class Run:
    id = "x"
    def define_metric(self, *a, **kw): pass
    starting_step, resumed = 0, False
    def log(self, point, step, commit):
        if once("log_raises"): raise RuntimeError("the tracker is broken")
        if once("log_pipe"): raise BrokenPipeError(32, "broken pipe")
        while said("log_hangs"): time.sleep(0.05)
        with (state / "points").open("a") as f: f.write(json.dumps(point) + "\\\\n")
    def finish(self): (state / "finished").touch()
def init(**kw):
    with (state / "inits").open("a") as f: f.write(json.dumps(kw["id"]) + "\\\\n")
    if once("init_raises") or once("init_raises_again"): raise RuntimeError("no route to the tracker")
    if once("init_starts_another"):
        helper = subprocess.Popen(["sleep", "600"])
        with (state / "pids").open("a") as f: f.write(f"{os.getpid()} {helper.pid}\\n")
    while said("init_hangs"): time.sleep(0.05)
    return Run()
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a `wandb` that does what files named here say."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(STAND_IN.replace("\\\\n", "\\n"))
    return tmp_path / "fake"


def start_with(make: Make, stand_in: Path, *words: str, **options: object) -> MetricsProcess:
    for word in words:
        (stand_in / word).touch()
    environment = {"PYTHONPATH": str(stand_in), "STAND_IN": str(stand_in)}
    return make(use_wandb=True, environment=environment, **options).start()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def steps(stand_in: Path) -> list[int]:
    """Of the points, in the order in which they came."""
    return [json.loads(line)["train/step"] for line in lines(stand_in / "points")]


def num_warnings(service: MetricsProcess) -> int:
    return service.run_dir.log("metrics").read_text().count('"sink_failing"')


def test_log_that_raises_costs_no_row_no_other_sink_and_no_warning(make: Make, stand_in: Path) -> None:
    """Tried again in its place, and over before anybody has to know."""
    service = start_with(make, stand_in, "log_raises", "log_pipe")
    for n in range(1, 6):
        send(service, batch([part(n, {"train/loss": ["last", n]})], first=n))
    assert [row["step"] for row in service.wait_rows(5)] == [1, 2, 3, 4, 5]
    service.flush()
    assert steps(stand_in) == [1, 2, 3, 4, 5]
    assert not (stand_in / "log_raises").exists() and not (stand_in / "log_pipe").exists()
    assert num_warnings(service) == 0


@pytest.mark.parametrize("word", ["init_hangs", "log_hangs"])
def test_wandb_that_hangs_disturbs_nothing_and_misses_nothing(make: Make, stand_in: Path, word: str) -> None:
    service = start_with(make, stand_in, word)
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(1, 6)]))
    assert len(service.wait_rows(5)) == 5
    states = {sink.name: sink.state for sink in service.status().sinks}
    assert states["jsonl"] == "healthy"
    assert steps(stand_in) == []
    (stand_in / word).unlink()
    service.flush()
    assert steps(stand_in) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_init_that_hangs_past_its_limit_is_killed_with_all_it_started_and_tried_again(
    make: Make, stand_in: Path
) -> None:
    service = start_with(make, stand_in, "init_hangs", "init_starts_another", wandb_init_timeout_s=1.0)
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(1, 6)]))
    until(lambda: lines(stand_in / "pids"), "the first try")
    first = [int(word) for word in lines(stand_in / "pids")[0].split()]
    state = lambda: {sink.name: sink for sink in service.status().sinks}["wandb"]  # noqa: E731
    until(lambda: state().state == "failing", "the end of its time", limit_s=60)
    assert "start took longer than" in state().last_error and len(service.rows()) == 5
    until(lambda: not any(psutil.pid_exists(pid) for pid in first), "the end of the first try and of its helper")
    (stand_in / "init_hangs").unlink()
    until(lambda: steps(stand_in) == [1, 2, 3, 4, 5], "the second try", limit_s=60)
    inits = lines(stand_in / "inits")
    assert len(inits) >= 2 and len(set(inits)) == 1 and num_warnings(service) == 1


def test_run_is_finished_by_us_and_not_by_the_end_of_its_process(make: Make, stand_in: Path) -> None:
    """What a process does at its exit is not done in every child; this stand-in does nothing there."""
    service = start_with(make, stand_in)
    send(service, batch([part(1, {"train/loss": ["last", 1]})]))
    service.flush()
    assert service.stop() == 3
    assert steps(stand_in) == [1] and (stand_in / "finished").exists()


def test_init_that_raises_is_tried_again_under_the_same_id(make: Make, stand_in: Path) -> None:
    service = start_with(make, stand_in, "init_raises", "init_raises_again")
    send(service, batch([part(1, {"train/loss": ["last", 1]})]))
    until(lambda: steps(stand_in) == [1], "a point in wandb")
    ids = lines(stand_in / "inits")
    assert len(ids) == 3 and len(set(ids)) == 1
    assert num_warnings(service) == 1  # of one cause


@pytest.mark.slow
@pytest.mark.parametrize("word", ["init_hangs", "log_hangs"])
def test_service_whose_wandb_hangs_ends_within_its_budget(make: Make, stand_in: Path, word: str) -> None:
    service = start_with(make, stand_in, word)
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(1, 4)]))
    service.wait_rows(3)
    until(lambda: lines(stand_in / "inits"), "wandb at work")
    begun = time.monotonic()
    assert service.stop() == 3
    assert time.monotonic() - begun < service.config.run.drain_budget_s + 3
    assert len(service.rows()) == 3 and steps(stand_in) == []
    (stand_in / word).unlink()
    service.start()
    until(lambda: steps(stand_in) == [1, 2, 3], "what was left")


@pytest.mark.parametrize(
    ("given", "environment", "mode"),
    [
        ("disabled", {"WANDB_API_KEY": "k"}, "disabled"),
        (None, {"WANDB_API_KEY": "k"}, "online"),
        (None, {"WANDB_API_KEY_FILE": "f"}, "online"),
        (None, {}, "offline"),
        (None, {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
    ],
)
def test_mode_follows_the_key(given: str | None, environment: dict[str, str], mode: str) -> None:
    assert choose_mode(given, environment) == mode
