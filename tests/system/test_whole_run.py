"""One unbroken run of the real services, looked at from every side."""

from pathlib import Path

import orjson

from furlong.launch.checkpoints import newest_checkpoint
from furlong.process import ExitCode
from tests.system.conftest import SECRET
from tests.system.real_runs import Up, values


def test_it_ends_done_with_nothing_left_running(whole_run: Up) -> None:
    assert whole_run.process.returncode == ExitCode.DONE, whole_run.told()
    assert len(whole_run.seen) >= 5  # metrics, router, rollout, engine, trainer
    assert whole_run.left_running(within_s=2) == []


def test_stdout_has_a_row_for_each_iteration_and_a_summary(whole_run: Up) -> None:
    for number in range(1, 5):
        assert f"[trainer] iter {number}/4 | loss=" in whole_run.stdout
    assert "done: 4 of 4 rollouts" in whole_run.stdout and "eval/held_out" in whole_run.stdout


def test_every_step_has_one_complete_row(whole_run: Up) -> None:
    rows = [orjson.loads(line) for line in whole_run.run_dir.metrics_rows.read_bytes().splitlines()]
    assert all(row["complete"] and not row.get("amends") for row in rows)
    steps = sorted((row["axis"], row["step"]) for row in rows)
    assert [step for axis, step in steps if axis == "rollout/step"] == [0, 1, 2, 3]
    assert len([step for axis, step in steps if axis == "train/step"]) == 8
    assert len(steps) == len(set(steps))


def test_the_numbers_are_there_and_finite(whole_run: Up) -> None:
    found = values(whole_run.run_dir)
    assert all(not isinstance(value, str) for row in found.values() for value in row.values())
    assert {"rollout/raw_reward", "rollout/advantages"} <= found["rollout/step", 3].keys()
    assert 0 <= float(found["rollout/step", 3]["rollout/raw_reward"]) <= 1


def test_newest_checkpoint_is_the_last_rollouts(whole_run: Up) -> None:
    checkpoint = newest_checkpoint(whole_run.run_dir)
    assert checkpoint is not None and checkpoint.rollout_id == 3


def test_log_files_hold_json_lines_of_each_instance(whole_run: Up) -> None:
    for instance in ("metrics", "router", "rollout", "trainer-0"):
        lines = whole_run.run_dir.log(instance).read_bytes().splitlines()
        assert lines and all(orjson.loads(line)["instance"] == instance for line in lines)


def test_the_secret_shows_nowhere(whole_run: Up) -> None:
    assert SECRET not in whole_run.stdout + whole_run.stderr
    assert SECRET not in " ".join(whole_run.command_lines)
    holding = [str(path) for path in files(whole_run.run_dir.root) if SECRET.encode() in path.read_bytes()]
    assert holding == []


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]
