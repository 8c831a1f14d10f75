"""What programs and rotations do to files: each line comes once, and what is no log is left alone."""

import os
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from furlong.config.destinations import tail_problems
from furlong.rundir import RunDir
from services.metrics.tailing import followed
from services.metrics.tailing.follower import Batch, Follower
from services.metrics.tailing.part import is_own_file
from services.metrics.tailing.patterns import is_related
from tests.metrics.tailing.fake_store import FakeStore, Hand


def add(path: Path, *lines: str, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(lines) + end)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "app.log"


def test_renamed_file_is_read_to_its_end_and_the_new_one_from_its_beginning(log: Path) -> None:
    hand = Hand(log)
    add(log, "1")
    assert hand.look() == ["1"]
    add(log, "2")
    log.rename(f"{log}.1")
    add(Path(f"{log}.1"), "3")
    add(log, "4")
    assert sorted(hand.look() + hand.look()) == ["2", "3", "4"]


def test_renamed_file_that_the_glob_matches_too_comes_once(log: Path) -> None:
    hand = Hand(f"{log}*")
    for number in range(6):
        add(log, str(number))
        hand.look()
        for old in range(number, 0, -1):
            Path(f"{log}.{old}").rename(f"{log}.{old + 1}")
        log.rename(f"{log}.1")
    hand.kill()
    hand.look()
    assert hand.store.texts == list("012345")
    assert {record["file"] for record in hand.store.records} == {str(log)}


def test_file_renamed_while_the_service_was_away_is_read_on_under_its_new_name(log: Path) -> None:
    hand = Hand(log)
    add(log, "1")
    hand.look()
    add(log, "2")
    hand.kill()
    log.rename(log.with_name("app.log.1"))
    add(log, "3")
    assert sorted(hand.look()) == ["2", "3"]
    hand.kill()
    assert hand.look() == []


def test_copied_and_cut_the_lines_between_come_from_the_copy(log: Path) -> None:
    """The copy is not among the files that are followed."""
    hand = Hand(log)
    add(log, "1")
    hand.look()
    add(log, "2", "3")
    shutil.copy(log, f"{log}.1")
    os.truncate(log, 0)
    add(log, "4")
    assert sorted(hand.look() + hand.look()) == ["2", "3", "4"]
    hand.kill()
    assert hand.look() == []


def test_copied_and_cut_while_the_service_was_away(log: Path) -> None:
    hand = Hand(log)
    add(log, "1")
    hand.look()
    add(log, "2")
    shutil.copy(log, f"{log}.1")
    os.truncate(log, 0)
    add(log, "3")
    hand.kill()
    assert sorted(hand.look() + hand.look()) == ["2", "3"]


def test_backup_copy_is_a_file_of_its_own_after_a_while(log: Path) -> None:
    hand = Hand(f"{log}*")
    add(log, "1")
    hand.look()
    shutil.copy(log, f"{log}.bak")
    assert hand.look() == []
    assert hand.look(pass_s=11.0) == ["1"]


def test_cut_file_is_read_from_its_beginning(log: Path) -> None:
    hand = Hand(log)
    add(log, *(f"{n} {'x' * 200}" for n in range(10_000)))
    assert len(hand.look()) == 10_000
    os.truncate(log, 0)
    add(log, *map(str, range(10)))
    assert hand.look() + hand.look() == list(map(str, range(10)))


def test_file_cut_and_grown_past_the_old_place_is_known_by_its_content(log: Path) -> None:
    hand = Hand(log)
    add(log, "old 1", "old 2")
    hand.look()
    os.truncate(log, 0)
    add(log, *(f"new {n}" for n in range(5)))
    assert hand.look() + hand.look() == [f"new {n}" for n in range(5)]


def test_file_written_anew_to_the_same_size_is_known_by_its_content(log: Path) -> None:
    hand = Hand(log)
    add(log, "old")
    hand.look()
    log.write_text("new\n")
    assert hand.look() + hand.look() == ["new"]


def test_file_that_begins_alike_and_goes_on_otherwise_is_new(log: Path) -> None:
    banner = ["banner " + "=" * 400] * 3
    hand = Hand(log)
    add(log, *banner, "old")
    hand.look()
    os.truncate(log, 0)
    add(log, *banner, "new", "more")
    assert hand.look() + hand.look() == [*banner, "new", "more"]


def test_file_replaced_by_rename_is_new(log: Path) -> None:
    hand = Hand(log)
    add(log, "1")
    hand.look()
    scratch = log.with_name("scratch")
    add(scratch, "2")
    scratch.replace(log)
    assert hand.look() + hand.look() == ["2"]


def test_file_that_is_written_anew_with_its_old_lines_goes_on(log: Path) -> None:
    """As rsync does: a scratch file is renamed into place."""
    lines = [f"{n} {'x' * 100}" for n in range(100)]
    hand = Hand(log)
    add(log, *lines)
    hand.look()
    scratch = log.with_name("scratch")
    add(scratch, *lines, "more")
    scratch.replace(log)
    assert hand.look() + hand.look() == ["more"]


def test_removed_file_is_read_to_its_end_and_then_let_go(log: Path) -> None:
    hand = Hand(log)
    add(log, "1")
    hand.look()
    add(log, "2")
    log.unlink()
    assert hand.look() == ["2"]
    hand.look(pass_s=5.0)
    hand.look()
    assert (hand.follower.files, hand.store.marks) == ({}, {})


def test_inode_that_is_given_away_again_is_another_file(log: Path) -> None:
    hand = Hand(log)
    add(log, "old 1", "old 2")
    hand.look()
    mark = next(iter(hand.store.marks.values()))
    hand.kill()
    log.unlink()
    add(log, "new 1", "new 2", "new 3")
    stat = log.stat()
    reused = mark.replace(f'"ino":{followed.Mark.load(mark).ino}'.encode(), f'"ino":{stat.st_ino}'.encode())  # type: ignore[union-attr]
    hand.store.marks = {followed.mark_name(stat.st_dev, stat.st_ino): reused}
    hand.kill()
    assert hand.look() == ["new 1", "new 2", "new 3"]


def test_device_that_is_numbered_anew_is_the_same_file(log: Path) -> None:
    hand = Hand(log)
    add(log, "1")
    hand.look()
    (name,) = hand.store.marks
    dev = log.stat().st_dev
    old = hand.store.marks.pop(name).replace(f'"dev":{dev}'.encode(), f'"dev":{dev + 7}'.encode())
    hand.store.marks[followed.mark_name(dev + 7, log.stat().st_ino)] = old
    hand.kill()
    add(log, "2")
    assert hand.look() == ["2"]


def test_two_names_of_one_file_are_one(log: Path, tmp_path: Path) -> None:
    add(log, "1")
    (tmp_path / "current.log").symlink_to(log)
    os.link(log, tmp_path / "hard.log")
    hand = Hand(tmp_path / "*.log")
    assert hand.look() + hand.look() == ["1"]


def test_link_that_points_elsewhere_later_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "current.log"
    one, two = tmp_path / "a.1", tmp_path / "a.2"
    add(one, "1")
    add(two, "2")
    link.symlink_to(one)
    hand = Hand(link)
    assert hand.look() == ["1"]
    link.unlink()
    link.symlink_to(two)
    assert hand.look() == ["2"]


def test_globs_take_files_that_appear_later_also_in_new_folders(tmp_path: Path) -> None:
    hand = Hand(tmp_path / "**" / "*.log", tmp_path / "[x]" / "odd?.txt")
    assert hand.look() == []
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "x").mkdir()
    add(tmp_path / "a" / "b" / "deep.log", "deep")
    add(tmp_path / "top.log", "top")
    add(tmp_path / "x" / "odd1.txt", "odd")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert sorted(hand.look()) == ["deep", "odd", "top"]


def test_what_is_no_log_is_left_alone_and_said_once(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(b"\x1f\x8bpacked")
    (tmp_path / "folder.log").mkdir()
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "wide.log").write_bytes("wide\n".encode("utf-16"))
    add(tmp_path / "a.log", "1")
    hand = Hand(tmp_path / "*.log*")
    with capture_logs() as logs:
        assert hand.look() + hand.look() + hand.look() == ["1"]
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["tail_skips_utf16"]


def test_folder_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (problem,) = tail_problems([str(tmp_path), str(tmp_path / "*.log")])
    assert f"--tail '{tmp_path}/*.log'" in str(problem.remedy)


def test_file_that_may_not_be_read_for_a_while_goes_on_where_it_was(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(log)
    add(log, "1")
    hand.look()
    add(log, "2")
    real_open = os.open

    def refuse(path: str, flags: int, *more: int) -> int:
        if str(path) == str(log):
            raise PermissionError(13, "Permission denied")
        return real_open(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    hand.kill()
    with capture_logs() as logs:
        assert hand.look() + hand.look(pass_s=2.0) + hand.look(pass_s=2.0) == []
    assert [entry["event"] for entry in logs] == ["tail_open_failed"]
    monkeypatch.setattr(os, "open", real_open)
    assert hand.look(pass_s=2.0) == ["2"]


def test_traceback_of_a_file_that_is_back_later_comes_once(log: Path) -> None:
    hand = Hand(log)
    add(log, "Traceback (most recent call last):", '  File "x.py", line 1, in f')
    hand.look()
    hand.kill()
    away = log.parent.parent / f"{log.parent.name}-away"
    log.rename(away)
    assert len(hand.look()) == 1
    away.rename(log)
    add(log, "after")
    assert hand.look() == ["after"]


def test_half_line_waits_for_its_end_and_comes_as_it_is_after_a_silence(log: Path) -> None:
    hand = Hand(log)
    add(log, "whole", "ha", end="")
    assert hand.look() == ["whole"]
    assert hand.look(pass_s=4.0) == []
    assert hand.look(pass_s=1.5) == ["ha"]
    hand.kill()
    add(log, "lf")
    assert hand.look() == ["lf"]
    assert [record.get("continued") for record in hand.store.records] == [None, None, True]


def test_half_line_is_handed_on_at_the_end_of_the_service(log: Path) -> None:
    hand = Hand(log)
    add(log, "A", "B", end="")
    hand.look()
    assert hand.finish() == ["B"]
    hand.start()
    add(log, "")
    assert hand.look() == []


def test_traceback_that_a_kill_interrupts_is_whole(log: Path) -> None:
    hand = Hand(log)
    add(log, "Traceback (most recent call last):", '  File "x.py", line 1, in f')
    assert hand.look() == []
    hand.kill()
    add(log, "ValueError: x", "[2026-11-29 17:03:41] after")
    first, second = hand.look()
    assert (first.splitlines()[-1], second) == ("ValueError: x", "[2026-11-29 17:03:41] after")


def test_traceback_of_a_file_that_is_gone_after_a_kill_is_not_lost(log: Path) -> None:
    hand = Hand(log)
    add(log, "Traceback (most recent call last):", '  File "x.py", line 1, in f')
    hand.look()
    hand.kill()
    log.unlink()
    assert hand.look() == ['Traceback (most recent call last):\n  File "x.py", line 1, in f']
    hand.kill()
    assert hand.look() == []


def test_traceback_is_handed_on_after_a_second_of_silence(log: Path) -> None:
    hand = Hand(log)
    add(log, "Traceback (most recent call last):", '  File "x.py", line 1, in f')
    hand.look()
    (text,) = hand.look(pass_s=1.1)
    assert text.count("\n") == 1


def test_mark_holds_no_byte_of_the_file_that_was_handed_on(log: Path) -> None:
    hand = Hand(log)
    add(log, "password=hunter22")
    hand.look()
    assert b"hunter22" not in b"".join(hand.store.marks.values())


def test_damaged_mark_is_forgotten(log: Path) -> None:
    store = FakeStore()
    store.marks = {"tail/1:2": b"{}", "tail/3:4": b"no json"}
    add(log, "1")
    hand = Hand(log, store=store)
    assert hand.look() == ["1"]
    assert len(store.marks) == 1


def test_each_of_many_files_gets_its_turn(tmp_path: Path) -> None:
    flood = tmp_path / "a-flood.log"
    flood.write_bytes(b"x" * 99 * 1000 + b"\n" + (b"y" * 99 + b"\n") * 100_000)
    for number in range(50):
        add(tmp_path / f"b-{number}.log", f"small {number}")
    hand = Hand(tmp_path / "*.log")
    moment = hand.moment()
    batch = Batch()
    hand.follower.discover(moment, batch)
    assert hand.follower.read(moment, batch, max_bytes=512 * 1024)
    assert sum(b'"text":"small' in body for body in batch.bodies) == 50
    assert batch.size_bytes < 1024 * 1024


def test_files_of_the_run_itself_are_not_followed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).create()
    own = [run_dir.log("trainer-0"), run_dir.metrics_rows, run_dir.metrics_store / "x.log", run_dir.spool / "y"]
    others = [run_dir.log("engine-0").with_suffix(".out"), tmp_path / "other.log", tmp_path.parent / "else.log"]
    assert [is_own_file(str(path), run_dir) for path in own + others] == [True] * 4 + [False] * 3
    for path in own + others[:2]:
        add(path, path.name)
    follower = Follower([f"{tmp_path}/**/*"], run="r", marks={}, is_own=lambda path: is_own_file(path, run_dir))
    follower.discover(Hand().moment(), Batch())
    assert {file.path for file in follower.files.values()} == {str(path) for path in others[:2]}
    follower.close()


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("app.log", "app.log.1", True),
        ("app.log", "app.log-20261129", True),
        ("app.log", "app-20261129.log", True),
        ("app.log", "app.1.log", True),
        ("app.log", "app.log", False),
        ("engine-1.out", "engine-10.out", False),
        ("engine-1.out", "engine-2.out", False),
        ("app.log", "apple.log", False),
    ],
)
def test_names_of_rotated_files(name: str, other: str, expected: bool) -> None:
    assert is_related(name, other) is expected
