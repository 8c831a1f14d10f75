"""What `furlong up` says first and last."""

from pathlib import Path

import orjson

from furlong.cli.changes import changed_values
from furlong.cli.summary import closing_lines
from furlong.config import to_toml
from furlong.launch.supervisor import Ending
from furlong.process import ExitCode
from furlong.rundir import RunDir
from tests.launch.runs import read, small_run


def test_summary_tells_reward_evaluation_and_places(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    rows = [("rollout/step", 0, {"rollout/raw_reward": 0.25}), ("rollout/step", 1, {"rollout/raw_reward": 0.75})]
    rows += [
        ("eval/step", -1, {"eval/sums": 0.4, "eval/sums-truncated_ratio": 0.0}),
        ("eval/step", 1, {"eval/sums": "NaN"}),
    ]
    written = [
        orjson.dumps({"axis": axis, "step": step, "attempt": 1, "values": values}) for axis, step, values in rows
    ]
    run_dir.metrics_rows.write_bytes(b"\n".join(written))
    lines = "\n".join(closing_lines(read(small_run(tmp_path)), run_dir, Ending(ExitCode.DONE, ""), seconds=3.21))
    assert "done: 2 of 3 rollouts; this start took 3.2 s" in lines
    assert "0.250 -> 0.750" in lines and "eval/sums  0.400 -> NaN" in lines and "truncated" not in lines
    assert str(run_dir.metrics_rows) in lines and "checkpoint  none" in lines


def test_summary_of_a_run_without_rows_is_truthful(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    lines = "\n".join(closing_lines(read(small_run(tmp_path)), run_dir, Ending(ExitCode.CRASHED, "x"), seconds=1))
    assert "failed: 0 of 3 rollouts" in lines and "no rows yet" in lines


def test_changes_since_the_last_start_are_named(tmp_path: Path) -> None:
    path = small_run(tmp_path)
    earlier = tmp_path / "earlier.toml"
    earlier.write_text(to_toml(read(path)))
    assert changed_values(earlier, read(path)) == []
    assert changed_values(earlier, read(path, "--num-rollout", "9")) == ["run.num_rollout: 3 -> 9"]
