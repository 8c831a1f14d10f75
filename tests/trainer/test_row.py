"""The row on stdout: its shape, missing and broken values, a stdout that nobody reads."""

import math
import os
import re

from services.trainer.row import IterationRow, format_row
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


def test_closed_stdout_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    rows = RowWriter(writer)
    rows.write("x")
    rows.close(5.0)
    assert rows.num_dropped == 1
