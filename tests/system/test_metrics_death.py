"""The metrics service of a real run is killed, again and again: training goes on, and every row is there once."""

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest

from furlong.launch.lock import read_started
from furlong.process import ExitCode
from furlong.spool import waiting
from tests.system.conftest import Start
from tests.system.real_runs import LIMIT_S, ROOT, Up, final_weights, values


def until(up: Up, condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert up.process.poll() is None, f"it ended before: {what}\n{up.told()}"
        assert time.monotonic() < deadline, f"{what}\n{up.told()}"
        time.sleep(0.01)


def kill_metrics(up: Up) -> int:
    """SIGKILL for the one that runs now; its pid."""
    up.look()
    started = read_started(up.run_dir)
    assert started is not None
    pid = started.children["metrics"].pid
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_restarted(up: Up, dead: int) -> None:
    def is_new() -> bool:
        started = read_started(up.run_dir)
        return started is not None and started.children["metrics"].pid != dead

    until(up, is_new, "metrics was started again")
    until(up, lambda: up.stdout.count("starting it again") <= up.stdout.count("metrics ready at"), "metrics serves")


def same_as(whole_run: Up, up: Up) -> None:
    """It ended well, nothing is left, and each row is in metrics.jsonl once, as in the unbroken run."""
    assert up.end() == ExitCode.DONE, up.told()
    assert up.left_running(within_s=2) == []
    lines = [json.loads(line) for line in up.run_dir.metrics_rows.read_text().splitlines()]
    places = Counter((line["axis"], line["step"], line["attempt"]) for line in lines)
    assert all(count == 1 for count in places.values()), [line for line in lines if "amends" in line]
    assert all(line["complete"] for line in lines)
    assert values(up.run_dir) == values(whole_run.run_dir)
    assert final_weights(up.run_dir) == final_weights(whole_run.run_dir)
    assert set(waiting(up.run_dir.spool)) <= {"metrics"} and "not complete" not in up.stdout


def test_metrics_killed_while_it_starts(start: Start, whole_run: Up) -> None:
    up = start().wait_for("[up] started")
    kill_metrics(up)
    same_as(whole_run, up)
    assert "metrics was ended by SIGKILL" in up.stdout


@pytest.mark.slow
def test_metrics_killed_twice_in_the_middle(start: Start, whole_run: Up) -> None:
    up = start().wait_for("metrics ready at").wait_for("iter 1/4")
    wait_restarted(up, kill_metrics(up))
    kill_metrics(up)
    same_as(whole_run, up)
    assert up.stdout.count("starting it again") == 2 and '"event":"service_started_again"' in log(up)


def test_metrics_killed_while_it_drains(start: Start, whole_run: Up) -> None:
    up = start().wait_for("metrics ready at")
    until(up, lambda: '"event":"service_stopping"' in log(up), "metrics drains")
    kill_metrics(up)
    same_as(whole_run, up)


@pytest.mark.slow
def test_suspended_metrics_lets_training_finish(start: Start, whole_run: Up) -> None:
    up = start().wait_for("iter 1/4")
    started = read_started(up.run_dir)
    assert started is not None
    up.look()
    os.kill(started.children["metrics"].pid, signal.SIGSTOP)
    up.wait_for("iter 4/4", limit_s=30)
    same_as(whole_run, up)


@pytest.mark.slow
def test_metrics_that_is_given_up_is_told_with_the_command_that_completes_the_rows(start: Start, whole_run: Up) -> None:
    up = start().wait_for("iter 1/4")
    kill_metrics(up)
    set_schema(up, 99)
    assert up.end() == ExitCode.DONE, up.told()
    assert "(BAD_CONFIG) and is not started again" in up.stdout and up.left_running(within_s=2) == []
    assert re.search(r"not complete +\d+ records of .*rollout, router, trainer-0 wait in", up.stdout), up.told()
    found = re.search(r"complete with +furlong (.*?); Ctrl-C ends it", up.stdout)
    assert found is not None, up.told()
    set_schema(up, 2)
    command = [sys.executable, "-m", "furlong", *shlex.split(found[1])]
    completing = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert completing.stderr
        assert any("service_ready" in line for line in completing.stderr)
        completing.send_signal(signal.SIGINT)
        completing.communicate(timeout=LIMIT_S)
    finally:
        completing.kill()
    assert values(up.run_dir) == values(whole_run.run_dir)
    assert set(waiting(up.run_dir.spool)) <= {"metrics"}


def set_schema(up: Up, version: int) -> None:
    """Have its store refused, or taken again."""
    with closing(sqlite3.connect(up.run_dir.metrics_store / "metrics.db")) as store:
        store.execute(f"PRAGMA user_version = {version}")


def log(up: Up) -> str:
    path = up.run_dir.log("metrics")
    return path.read_text() if path.exists() else ""
