"""Checkpoints: complete or absent, whatever happens while one is written."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.trainer import checkpoint
from services.trainer.checkpoint import CheckpointError, Checkpoints, Meta


def meta(rollout_id: int) -> Meta:
    return Meta(rollout_id, rollout_id + 1, rollout_id + 1, 0, {"dtype": "float32"}, {"seed": "1"})


def content(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "hf").mkdir()
        (folder / "hf" / "model.bin").write_text(text * 1000)

    return write


def saved(root: Path, rollout_id: int, *, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(root, keep=keep)
    checkpoints.save(meta(rollout_id), rollout_state=f"state {rollout_id}".encode(), write=content(str(rollout_id)))
    return checkpoints


def test_newest_comes_back_as_it_was(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, keep=2).newest() is None
    saved(tmp_path, 3)
    newest = saved(tmp_path, 11).newest()
    assert newest is not None and newest.meta == meta(11)
    assert newest.rollout_state() == b"state 11"


def test_older_ones_are_removed_beyond_the_number_to_keep(tmp_path: Path) -> None:
    for rollout_id in range(4):
        saved(tmp_path, rollout_id, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout_000002", "rollout_000003"]


def test_checkpoints_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for rollout_id in (999_998, 999_999, 1_000_000):
        checkpoints = saved(tmp_path, rollout_id, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"rollout_999999", "rollout_1000000"}
    newest = checkpoints.newest()
    assert newest is not None and newest.meta.rollout_id == checkpoints.newest_rollout_id() == 1_000_000
    assert not checkpoints.owes_evaluation()
    saved(tmp_path, 1_000_001, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"rollout_1000000", "rollout_1000001"}


@pytest.mark.parametrize("name", ["hf/model.bin", "rollout_state.bin", "meta.json"])
@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"junk"), lambda path: path.write_bytes(b"")])
def test_damaged_newest_falls_back_to_the_one_before(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    saved(tmp_path, 1)
    checkpoints = saved(tmp_path, 2)
    damage(tmp_path / "rollout_000002" / name)
    newest = checkpoints.newest()
    assert newest is not None and newest.meta.rollout_id == 1
    again = saved(tmp_path, 2).newest()  # the damaged one does not stand in the way
    assert again is not None and again.meta.rollout_id == 2


def test_only_damaged_ones_is_an_error_and_not_a_new_run(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    (tmp_path / "rollout_000001" / "hf" / "model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints.*rollout_000001"):
        checkpoints.newest()


def test_full_disk_is_told_and_spares_the_old_ones(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"rollout_000002.*No space left.*Older checkpoints are intact"):
        checkpoints.save(meta(2), rollout_state=b"", write=full)
    newest = checkpoints.newest()
    assert newest is not None and newest.meta.rollout_id == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_000001"]


KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from services.trainer import checkpoint
from tests.trainer.test_checkpoint import saved
name, count = sys.argv[2], int(sys.argv[3])
owner = os if name in ("rename", "fsync") else checkpoint
real, calls = getattr(owner, name), 0
def dying(*arguments):
    global calls
    calls += 1
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
setattr(owner, name, dying)
saved(Path(sys.argv[1]), 2)
"""


@pytest.mark.parametrize(
    ("name", "count"), [("file_digest", 1), ("fsync", 1), ("fsync", 4), ("fsync", 5), ("rename", 1)]
)
def test_kill_while_saving_leaves_the_old_one(tmp_path: Path, name: str, count: int) -> None:
    saved(tmp_path, 1)
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), name, str(count)]
    ended = subprocess.run(command, timeout=60, cwd=Path(checkpoint.__file__).parents[2], env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    checkpoints = Checkpoints(tmp_path, keep=2)
    newest = checkpoints.newest()
    assert newest is not None and newest.meta.rollout_id == 1
    checkpoints.clear_remains()
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_000001"]


@pytest.mark.parametrize("name", ["rollout_latest", "rollout_", "rollout_²", "release", "rollout_000009"])
def test_strange_folders_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path, keep=2).newest() is None
