"""The command line as a person meets it: help, errors, exit codes; each a process of its own."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.runs import small_run

HEAVY = ("torch", "grpc", "tyro", "pydantic", "transformers", "wandb", "psutil")


def furlong(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "furlong", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)


def loaded_by(*arguments: str, among: tuple[str, ...]) -> str:
    """Which of some modules a command imports, as the text of a list."""
    run = "from furlong.cli.main import main; main(sys.argv[1:])"
    code = f"import sys; {run}; print([name for name in {among} if name in sys.modules])"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("argument", ["--help", "help", "-h"])
def test_help_lists_every_command(argument: str) -> None:
    done = furlong(argument)
    assert done.returncode == 0
    for command in ("up", "config", "status", "metrics", "router", "rollout", "trainer", "version"):
        assert f"\n  {command} " in done.stdout


def test_help_imports_nothing_heavy() -> None:
    assert loaded_by("--help", among=HEAVY) == "[]"


def test_config_imports_no_torch_and_no_grpc(tmp_path: Path) -> None:
    arguments = ("config", "--config", str(small_run(tmp_path)), "--lr", "0.1")
    assert loaded_by(*arguments, among=("torch", "grpc", "transformers", "wandb")) == "[]"


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        furlong("--help")
        times.append(time.perf_counter() - began)
    assert min(times) < 0.3


def test_unknown_command_names_the_closest() -> None:
    done = furlong("stauts")
    assert done.returncode == 2 and "furlong status" in done.stderr


def test_unknown_flag_names_the_closest(tmp_path: Path) -> None:
    done = furlong("up", "--config", str(small_run(tmp_path)), "--num-rolout", "3")
    assert done.returncode == 2 and "--num-rollout" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[run\nname = 1", "line 1"),
        ("[run]\nnum_rolout = 3", "run.num_rollout"),
        ("[run]\nnum_rollout = -3", "run.num_rollout = -3"),
        ("[runn]\nname = 'x'", "[run]"),
    ],
)
@pytest.mark.parametrize("command", ["up", "config", "trainer"])
def test_broken_config_is_told_without_a_traceback(tmp_path: Path, command: str, toml: str, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml)
    done = furlong(command, "--config", str(path))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_missing_config_file_is_told() -> None:
    done = furlong("up", "--config", "/no/such/file.toml")
    assert done.returncode == 2 and "/no/such/file.toml" in done.stderr


def test_option_without_its_value_is_told() -> None:
    done = furlong("up", "--config", "--lr", "0.1")
    assert done.returncode == 2 and "--config" in done.stderr


def test_printed_config_is_read_back_to_the_same(tmp_path: Path) -> None:
    first = furlong("config", "--config", str(small_run(tmp_path)), "--lr", "0.125")
    again = tmp_path / "again.toml"
    again.write_text(first.stdout)
    assert "lr = 0.125" in first.stdout and furlong("config", "--config", str(again)).stdout == first.stdout


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_unwritable_run_directory_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    done = furlong("up", "--config", str(small_run(tmp_path)), "--run-dir", place, cwd=tmp_path)
    assert done.returncode == 2 and "run.run_dir" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("file", [".up.lock", "config.toml"])
def test_folder_in_a_files_place_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "run" / file).mkdir(parents=True)
    done = furlong("up", "--config", str(small_run(tmp_path)), "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 2 and file in done.stderr and "Traceback" not in done.stderr


def test_missing_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = furlong("up", "--config", str(small_run(tmp_path)), "--hf-checkpoint", "nowhere")
    assert done.returncode == 2 and "model.hf_checkpoint" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["trainer", "--rank", "1"], "trainer_num_ranks"), (["router", "--rank", "1"], "one router"),
     (["router", "--rank", "x"], "whole number")],
)  # fmt: skip
def test_impossible_rank_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = furlong(*arguments, "--config", str(small_run(tmp_path)))
    assert done.returncode == 2 and said in done.stderr


def test_train_script_takes_the_flags_of_up(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "train.py"
    command = [sys.executable, str(script), "--config", str(small_run(tmp_path)), "--hf-checkpoint", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "model.hf_checkpoint" in done.stderr
