"""The row on stdout: its shape, missing and broken values, a stdout that nobody reads."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from services.trainer.row import IterationRow, already_done, format_row, json_row
from services.trainer.row_writer import QUEUE_ROWS, RowWriter


def row(**changes: object) -> IterationRow:
    fields: dict[str, object] = {
        "rollout_id": 11,
        "num_rollout": 3000,
        "loss": 0.412,
        "reward": 0.61,
        "kl": 0.018,
        "show_kl": True,
        "rollout_s": 18.4,
        "train_s": 22.1,
        "p2p_s": 2.1,
        "total_s": 42.6,
        "grad_norm": 0.93,
        "lr": 1e-6,
    }
    return IterationRow(**{**fields, **changes})  # type: ignore[arg-type]


def test_row_is_the_contracts() -> None:
    assert format_row(row()) == (
        "[trainer] iter 12/3000 | loss=0.412 reward=0.61 kl=0.018\n"
        "                       | rollout=18.4s train=22.1s p2p=2.1s  (total 42.6s)\n"
        "                       | grad_norm=0.93 lr=1.0e-06"
    )


def test_bars_stand_under_one_another_for_any_number() -> None:
    lines = format_row(row(rollout_id=0, num_rollout=7)).splitlines()
    assert len({line.index("|") for line in lines}) == 1 and len(lines) == 3


def test_kl_is_shown_only_with_a_kl_loss() -> None:
    assert "kl=" not in format_row(row(show_kl=False))


def test_nan_is_nan_and_missing_is_missing() -> None:
    text = format_row(row(loss=math.nan, reward=None, kl=None, grad_norm=math.inf, rollout_s=None))
    assert re.search(r"loss=nan reward=n/a kl=n/a", text)
    assert "grad_norm=inf" in text and "rollout=n/a" in text


def test_value_that_is_not_finite_is_marked_with_a_warning() -> None:
    marked = format_row(row(loss=math.nan, grad_norm=-math.inf, num_tokens=0)).splitlines()
    assert marked[3].endswith("| WARNING: loss is nan, grad_norm is -inf, 0 trained tokens")
    assert len(format_row(row(num_tokens=7, reward=None)).splitlines()) == 3


def test_time_that_no_part_has_is_shown() -> None:
    assert "p2p=2.1s other=3.0s  (total 45.6s)" in format_row(row(other_s=3.0, total_s=45.6))
    assert "other" not in format_row(row(other_s=0.04))


def test_row_as_json_is_one_object_a_line() -> None:
    text = json_row(row(rollout_s=None, num_tokens=9, other_s=0.0))
    assert "\n" not in text
    assert orjson.loads(text) == {
        "event": "iteration",
        "iter": 12,
        "num_iters": 3000,
        "loss": 0.412,
        "reward": 0.61,
        "kl": 0.018,
        "rollout": None,
        "train": 22.1,
        "p2p": 2.1,
        "other": 0.0,
        "total": 42.6,
        "grad_norm": 0.93,
        "lr": 1e-6,
        "num_tokens": 9,
    }


def test_row_as_json_says_what_is_not_finite_and_leaves_an_unused_kl_out() -> None:
    fields = orjson.loads(json_row(row(loss=math.nan, reward=math.inf, grad_norm=-math.inf, show_kl=False)))
    assert (fields["loss"], fields["reward"], fields["grad_norm"]) == ("NaN", "Infinity", "-Infinity")
    assert fields["warnings"] == ["loss is nan", "reward is inf", "grad_norm is -inf"] and "kl" not in fields


def test_run_that_is_done_says_so_in_the_format_asked_for() -> None:
    assert orjson.loads(already_done("arith", 9, 10, as_json=True))["event"] == "already_done"
    assert "--num-rollout is 10" in already_done("arith", 9, 10, as_json=False)


def test_rows_are_written_in_order() -> None:
    reader, writer = os.pipe()
    rows = RowWriter(writer)
    for text in ("one", "two"):
        rows.write(text)
    rows.close(5.0)
    assert os.read(reader, 100) == b"one\ntwo\n"


def test_unread_stdout_costs_rows_and_not_time() -> None:
    reader, writer = os.pipe()
    rows = RowWriter(writer)
    for _ in range(QUEUE_ROWS + 20):
        rows.write("x" * 4096)  # 1 MiB into a pipe of 64 KiB
    assert rows.num_dropped > 0
    os.close(reader)  # frees the thread
    rows.close(5.0)


def test_reader_that_comes_back_is_told_how_many_rows_it_missed() -> None:
    reader, writer = os.pipe()
    rows = RowWriter(writer)
    for number in range(QUEUE_ROWS + 40):
        rows.write(f"{number}".ljust(4096))
    dropped = rows.num_dropped
    with open(reader, "rb") as file:
        seen = [line.rstrip() for line in iter(file.readline, b"")] if _close_later(rows, writer) else []
    notices = [re.fullmatch(rb"\[trainer\] (\d+) rows were not shown here: nobody took them", line) for line in seen]
    told = [int(notice[1]) for notice in notices if notice]  # two, when the writer's thread came late
    assert dropped > 0 and sum(told) == dropped
    assert len(seen) == QUEUE_ROWS + 40 - dropped + len(told)


def _close_later(rows: RowWriter, writer: int) -> bool:
    """Ends the pipe once all is written, while somebody reads it."""
    import threading

    threading.Thread(target=lambda: (rows.close(10.0), os.close(writer))).start()
    return True


def test_stdout_that_somebody_made_non_blocking_tears_no_row() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    rows = RowWriter(writer)
    for number in range(100):
        rows.write(f"{number}".ljust(4095, "."))  # 400 KiB: the pipe is full in between
    _close_later(rows, writer)
    with open(reader, "rb") as file:
        lines = file.read().split(b"\n")[:-1]
    assert [int(line.rstrip(b".")) for line in lines] == list(range(100)) and rows.num_dropped == 0


def test_closed_stdout_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    rows = RowWriter(writer)
    rows.write("x")
    rows.close(5.0)
    assert rows.num_dropped == 1


def test_stdout_on_a_full_disk_is_no_error() -> None:
    rows = RowWriter(os.open("/dev/full", os.O_WRONLY))
    rows.write("x")
    rows.close(5.0)
    assert rows.num_dropped == 1


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", "| true"])
def test_process_whose_stdout_takes_nothing_goes_on_to_its_end(tmp_path: Path, redirect: str) -> None:
    """With a stdout that was closed from the start its number is soon another file's: rows must not end up in that."""
    program = """
import sys
other = open(sys.argv[1], "w")
from furlong import logs
from services.trainer.row_writer import RowWriter
logs.configure(run="r", service="trainer", instance="trainer-0", path=None, telemetry=None)
rows = RowWriter()
for _ in range(2000):
    rows.write("row" * 100)
rows.close(1.0)
other.write(f"{rows.num_dropped}")
other.close()
"""
    path = tmp_path / "other"
    command = f'"{sys.executable}" -c "$PROGRAM" "{path}" {redirect}'
    environment = {**os.environ, "PROGRAM": program}
    subprocess.run(["bash", "-c", command], env=environment, timeout=30, check=False, stderr=subprocess.DEVNULL)
    assert 0 < int(path.read_text()) <= 2000
