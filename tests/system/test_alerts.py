"""Alerts of real runs: shown under the rows, in a file, halting; and none where all is well."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from furlong.launch.checkpoints import newest_checkpoint
from furlong.process import ExitCode
from furlong.rundir import RunDir
from tests.metrics.running import until
from tests.system.conftest import Start
from tests.system.real_runs import LIMIT_S, ROOT, Up, small_config

LONG = ("--num-rollout", "400", "--save-interval", "0")


def rules(
    folder: Path, text: str = '[rules.any_reward]\nkey = "rollout/raw_reward"\nwhen = "above"\nvalue = -1'
) -> str:
    path = folder / "rules.toml"
    path.write_text(text)
    return str(path)


def alerts(run_dir: RunDir) -> list[dict[str, Any]]:
    path = run_dir.alerts
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def told(run_dir: RunDir) -> list[tuple[str, str, int]]:
    return [(alert["rule"], alert["state"], alert["attempt"]) for alert in alerts(run_dir)]


def test_a_halt_is_told_and_saved_and_its_code_is_true(start: Start, tmp_path: Path) -> None:
    up = start("--alert-rules", rules(tmp_path), *LONG, "--halt-on", "any_reward")
    assert up.end() == ExitCode.HALTED, up.told()
    assert "[alert] warning any_reward | rollout/step 0: rollout/raw_reward is" in up.stdout
    assert "the run stops for it (--halt-on any_reward)" in up.stdout and "stopped for an alert" in up.stdout
    assert "any_reward (warning" in up.stdout and "go on with" in up.stdout and up.stderr == ""
    assert newest_checkpoint(up.run_dir) is not None and ("any_reward", "firing", 1) in told(up.run_dir)


@pytest.mark.slow
def test_the_next_start_is_not_halted_by_what_fired_before(start: Start, tmp_path: Path) -> None:
    when = '[rules.first]\nkey = "rollout/weight_version/min"\nwhen = "below"\nvalue = 1\nresolve_rows = 100'
    flags = ("--alert-rules", rules(tmp_path, when), *LONG, "--halt-on", "first")
    assert start(*flags).end() == ExitCode.HALTED
    again = start(*flags)
    again.wait_for("iter 20/400").send(signal.SIGINT)
    assert again.end() == ExitCode.DRAINED, again.told()
    assert [one for one in told(again.run_dir) if one[0] == "first"] == [
        ("first", "firing", 1),
        ("first", "resolved", 1),
    ]


@pytest.mark.slow
def test_a_run_that_diverges_is_halted_as_such_and_saves_nothing_more(start: Start) -> None:
    up = start(
        "--lr",
        "0.5",
        "--clip-grad",
        "1e9",
        *LONG,
        "--halt-on",
        "entropy_collapse",
        "reward_constant",
        "reward_collapsed",
        "loss_nonfinite",
    )
    assert up.end() == ExitCode.DIVERGED, up.told()
    assert "[alert] CRITICAL" in up.stdout and "training diverged" in up.stdout
    assert newest_checkpoint(up.run_dir) is None


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--trainer-num-ranks", "2", "--rollout-num-engines", "2")])
def test_the_example_raises_no_alarm_from_start_to_end(tmp_path: Path, flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "furlong", "up", "--config", "examples/arithmetic/config.toml"]
    run_dir = RunDir(tmp_path / "run")
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir.root), *flags],
        capture_output=True,
        cwd=ROOT,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == ExitCode.DONE and alerts(run_dir) == [] and b"[alert]" not in done.stdout


@pytest.mark.slow
def test_an_engine_that_is_killed_is_told_and_its_return_too(start: Start) -> None:
    up = start("--num-rollout", "60", "--rollout-num-engines", "2", "--save-interval", "0").wait_for("iter 2/60")
    engine = next(p for p in up.look().values() if "services.rollout.engine" in " ".join(p.cmdline()))
    engine.kill()
    assert up.end() == ExitCode.DONE, up.told()
    states = [state for rule, state, _ in told(up.run_dir) if rule == "engine_gone"]
    assert states == ["firing", "resolved"] and "[alert] CRITICAL engine_gone | engine-" in up.stdout


@pytest.mark.slow
def test_a_halt_works_after_the_metrics_service_was_killed_and_started_again(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    when = '[rules.late]\nkey = "rollout/weight_version/min"\nwhen = "above"\nvalue = 12'
    flags = ("--alert-rules", rules(tmp_path, when), "--halt-on", "late", "--num-rollout", "400")
    place = ["--config", str(small_config(tmp_path)), "--run-dir", str(run_dir.root), *flags]
    started: dict[str, subprocess.Popen[bytes]] = {}

    def begin(service: str) -> None:
        with (tmp_path / f"{service}.out").open("ab") as out:
            started[service] = subprocess.Popen(
                [sys.executable, "-m", "furlong", service, *place],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )

    try:
        for service in ("metrics", "router", "rollout", "trainer"):
            begin(service)
        until(lambda: "iter 3/400" in (tmp_path / "trainer.out").read_text(), "three rollouts", limit_s=LIMIT_S)
        os.kill(started["metrics"].pid, signal.SIGKILL)
        started["metrics"].wait(10)
        begin("metrics")
        assert started["trainer"].wait(LIMIT_S) == ExitCode.HALTED
    finally:
        for process in started.values():
            process.kill()
            process.wait(10)
    assert "halt-on late" in (tmp_path / "trainer.out").read_text()
    assert [state for rule, state, _ in told(run_dir) if rule == "late"] == ["firing"]


def test_nothing_is_started_for_a_rule_that_there_is_not(start: Start) -> None:
    up: Up = start("--halt-on", "loss_spkie")
    assert up.end() == ExitCode.BAD_CONFIG
    assert "metrics.halt_on = 'loss_spkie': must be the name of an alert rule" in up.stderr
    assert not up.run_dir.root.exists()
