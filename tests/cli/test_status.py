"""`furlong status` of runs that are up, starting, half dead and dead."""

import os
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from furlong import addresses
from furlong.cli.main import main
from furlong.cli.status import as_table
from furlong.config import to_toml
from furlong.launch.lock import RunLock
from furlong.launch.look import InstanceStatus, look_at
from furlong.rundir import RunDir
from tests.launch.runs import read, small_run


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run directory as `furlong up` leaves it, with nothing running."""
    made = RunDir(tmp_path / "run").create()
    made.config.write_text(to_toml(read(small_run(tmp_path))))
    return made


def status(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    code = main(["status", "--run-dir", str(run_dir.root), "--json"])
    return code, orjson.loads(capsys.readouterr().out)


def states(found: dict[str, object]) -> dict[str, str]:
    instances = found["instances"]
    assert isinstance(instances, list)
    return {item["instance"]: item["state"] for item in instances}


def test_dead_run_is_all_gone(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = status(run_dir, capsys)
    assert code == 1 and set(states(found).values()) == {"gone"}


def test_living_process_that_does_not_answer_is_starting(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    addresses.publish(run_dir, "router", grpc="127.0.0.1:1")
    code, found = status(run_dir, capsys)
    assert code == 1 and states(found)["router"] == "starting" and states(found)["trainer-0"] == "gone"


def test_supervisor_and_its_children_are_seen(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(run_dir) as lock:
        lock.record({"trainer-0": os.getpid()})
        _, found = status(run_dir, capsys)
    assert found["supervised_by"] == os.getpid() and states(found)["trainer-0"] == "starting"
    _, found = status(run_dir, capsys)
    assert found["supervised_by"] is None


def test_supervised_run_that_is_ended_is_stopping(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(run_dir) as lock:
        lock.record({"trainer-0": os.getpid()})
        lock.record_stopping()
        code, found = status(run_dir, capsys)
    assert code == 1 and states(found)["trainer-0"] == "stopping" and states(found)["router"] == "gone"


def test_table_that_is_too_wide_says_the_rest_below(run_dir: RunDir) -> None:
    said = {"phase": "generating", "rollout_id": 5, "policy_version": 5}
    found = replace(look_at(run_dir), instances=[InstanceStatus("rollout", "serving", 17, 3.0, details=said)])
    assert "phase=generating" in as_table(found, width=None).splitlines()[2]
    narrow = as_table(found, width=50).splitlines()
    assert narrow[2].startswith("rollout") and narrow[3] == "    phase=generating rollout_id=5 policy_version=5"


def test_last_checkpoint_and_row_are_shown(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rollout_000003", ".writing-rollout_000004", "rollout_000005"):
        (run_dir.checkpoints / name).mkdir()
        if name != "rollout_000005":  # which is not complete: no meta.json
            (run_dir.checkpoints / name / "meta.json").write_text("{}")
    row = {"run": "small", "axis": "rollout/step", "attempt": 1, "values": {"rollout/raw_reward": 0.5}}
    lines = [orjson.dumps({**row, "step": step}) for step in (3, 4)]
    run_dir.metrics_rows.write_bytes(b"\n".join([*lines, b'{"torn": ']))
    _, found = status(run_dir, capsys)
    assert found["last_checkpoint"] == 3 and found["last_row"] == {"step": 4, "rollout/raw_reward": 0.5}


def test_finished_run_is_said_to_be_done(run_dir: RunDir) -> None:
    found = look_at(run_dir)
    assert "done" not in as_table(found, width=None)
    assert "after rollout 2, with which the run is done" in as_table(replace(found, last_checkpoint=2), width=None)


def test_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--run-dir", str(tmp_path)]) == 2
    assert "config.toml" in capsys.readouterr().err
