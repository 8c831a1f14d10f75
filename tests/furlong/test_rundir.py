"""The run directory: folders that can be written, files replaced whole."""

from pathlib import Path

import pytest

from furlong.config import ConfigError
from furlong.rundir import RunDir, write_atomically


def test_create_makes_every_folder_and_may_be_repeated(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a" / "b").create().create()
    folders = (
        run_dir.checkpoints,
        run_dir.metrics_store,
        run_dir.spool,
        run_dir.rollout_store,
        run_dir.router_state.parent,
        run_dir.log("x").parent,
    )
    assert all(folder.is_dir() for folder in folders)
    assert sorted(path.name for path in run_dir.root.iterdir()) == sorted(folder.name for folder in folders)


def test_a_place_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--run-dir"):
        RunDir(tmp_path / "file").create()


def test_writing_replaces_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_atomically(file, b"old" * 1000)
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new" and list(tmp_path.iterdir()) == [file]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    write_atomically(file, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]
