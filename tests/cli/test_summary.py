"""What `furlong up` says first and last."""

from pathlib import Path
from tempfile import mkdtemp

import orjson
import pytest

from furlong.cli.changes import changed_values
from furlong.cli.summary import closing_lines
from furlong.cli.up import same_command
from furlong.config import to_toml
from furlong.launch.supervisor import Ending
from furlong.process import ExitCode
from furlong.rundir import RunDir
from tests.launch.runs import read, small_run


def with_rows(tmp_path: Path, *rows: tuple[int, int, float]) -> RunDir:
    """A run directory with rows of (step, attempt, reward)."""
    run_dir = RunDir(tmp_path / "run").create()
    trees = [
        {"axis": "rollout/step", "step": step, "attempt": attempt, "values": {"rollout/raw_reward": reward}}
        for step, attempt, reward in rows
    ]
    run_dir.metrics_rows.write_bytes(b"\n".join(map(orjson.dumps, trees)))
    return run_dir


def save_checkpoint(run_dir: RunDir, rollout_id: int) -> None:
    folder = run_dir.checkpoints / f"rollout_{rollout_id:06d}"
    folder.mkdir()
    (folder / "meta.json").write_text("{}")


def closed(tmp_path: Path, run_dir: RunDir, code: ExitCode, *flags: str) -> str:
    config, ending = read(small_run(Path(mkdtemp(dir=tmp_path))), *flags), Ending(code, "")
    return "\n".join(closing_lines(config, run_dir, ending, seconds=3.21, again="furlong up --config run.toml"))


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
    lines = closed(tmp_path, run_dir, ExitCode.DONE)
    assert "done: 2 of 3 rollouts; this start took 3.2 s" in lines
    assert "0.250 -> 0.750" in lines and "eval/sums   0.400 -> NaN" in lines and "truncated" not in lines
    assert str(run_dir.metrics_rows) in lines and "checkpoint  none" in lines


def test_summary_of_a_run_without_rows_is_truthful(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    lines = closed(tmp_path, run_dir, ExitCode.CRASHED)
    assert "failed: 0 of 3 rollouts" in lines and "no rows yet" in lines


def test_summary_counts_what_is_saved_and_leaves_out_what_a_killed_start_did(tmp_path: Path) -> None:
    run_dir = with_rows(tmp_path, *((step, 1, 0.5) for step in range(3)))
    save_checkpoint(run_dir, 0)
    assert "stopped at once: 3 of 3 rollouts, 1 of them saved" in closed(tmp_path, run_dir, ExitCode.KILLED)
    save_checkpoint(run_dir, 1)
    lines = closed(tmp_path, run_dir, ExitCode.DRAINED)
    assert "stopped as asked: 2 of 3 rollouts; this start" in lines


@pytest.mark.parametrize(("code", "told"), [(ExitCode.DRAINED, True), (ExitCode.CRASHED, True), (ExitCode.DONE, False)])
def test_summary_says_how_to_go_on_unless_all_is_done(tmp_path: Path, code: ExitCode, told: bool) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    assert ("go on with  furlong up --config run.toml" in closed(tmp_path, run_dir, code)) == told


def test_summary_says_how_offline_wandb_files_are_uploaded(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    (run_dir.root / "wandb" / "offline-run-1").mkdir(parents=True)
    assert f"wandb sync {run_dir.root}/wandb/offline-run-*" in closed(tmp_path, run_dir, ExitCode.DONE, "--use-wandb")
    assert "wandb sync" not in closed(tmp_path, run_dir, ExitCode.DONE)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("env/bin/furlong", "env/bin/furlong up --name 'a b'"),
        ("/x/furlong/__main__.py", "python -m furlong up --name 'a b'"),
        ("train.py", "python train.py --name 'a b'"),
    ],
)
def test_command_to_go_on_is_the_one_that_was_typed(program: str, said: str) -> None:
    assert same_command(program, ["--name", "a b"]) == said


def test_changes_since_the_last_start_are_named(tmp_path: Path) -> None:
    path = small_run(tmp_path)
    earlier = tmp_path / "earlier.toml"
    earlier.write_text(to_toml(read(path)))
    assert changed_values(earlier, read(path)) == []
    assert changed_values(earlier, read(path, "--num-rollout", "9")) == ["run.num_rollout: 3 -> 9"]
