"""`furlong status` of runs that are up, starting, half dead and dead."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

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
from tests.metrics.asking import post
from tests.metrics.running import MetricsProcess, until


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


def test_followed_files_and_read_endpoints_have_lines_of_their_own(run_dir: RunDir) -> None:
    file = {"path": "x.log", "behind_bytes": 2048, "num_lines": 7, "num_truncations": 1, "num_invalid": 2}
    file |= dict.fromkeys(("num_clipped", "num_welded", "num_partial"), 0)
    endpoint = {"instance": "e-0", "url": "http://h:1/m", "num_readings": 3, "num_failures": 1, "last_error": "refused"}
    said = {"num_records": 5, "files": [file], "endpoints": [endpoint]}
    text = as_table(
        replace(look_at(run_dir), instances=[InstanceStatus("metrics", "serving", details=said)]), width=None
    )
    assert "file x.log: 7 lines, 2.0 KiB behind; 2 not UTF-8; cut or written anew 1 time" in text.splitlines()
    assert "endpoint e-0 http://h:1/m: failing because refused; 3 readings, 1 failure" in text.splitlines()
    assert "files=" not in text


def test_files_and_endpoints_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("one\ntwo\n")
    service = MetricsProcess(tmp_path, tail=[str(tmp_path / "x.log")], scrape=["e-0=http://127.0.0.1:9/metrics"])
    try:
        service.start()
        service.run_dir.config.unlink(missing_ok=True)  # as a service of no run: its config describes no whole one

        def told() -> dict[str, Any]:  # Any: JSON
            return dict(next(i for i in look_at(service.run_dir).instances if i.instance == "metrics").details)

        until(lambda: told()["files"] and told()["files"][0]["num_lines"] == 2, "both lines read")
        until(lambda: told()["endpoints"][0]["last_error"], "the endpoint tried")
        status = orjson.loads(urlopen(f"{service.http}/api/status").read())
        assert status["files"][0]["num_lines"] == 2 and status["endpoints"][0]["num_readings"] == 0
    finally:
        service.end()


def test_service_at_a_url_is_looked_at_with_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = MetricsProcess(tmp_path).start()
    url = service.http
    try:
        record = {"event": "metrics", "run": "mine", "axis": "train/step", "step": 7, "values": {"a": 1}}
        post(service.http, orjson.dumps(record))
        until(service.rows, "the row")
        assert main(["status", "--url", url]) == 0
        said = capsys.readouterr().out
        assert f"metrics service at {url}" in said and "run mine: train/step 7; last heard" in said
        assert main(["status", "--url", url, "--json"]) == 0
        tree = orjson.loads(capsys.readouterr().out)
        assert tree["all_up"] and "mine" in [run["run"] for run in tree["runs"]]
        assert tree["instances"][0]["details"]["num_rows"] >= 1
    finally:
        service.end()
    assert main(["status", "--url", url]) == 5
    assert main(["status", "--url", url, "--run-dir", str(tmp_path)]) == 2
