"""Reading metrics.jsonl while, and after, others wrote it."""

from pathlib import Path

import orjson

from furlong.launch.rows import read_rows


def write(path: Path, *rows: tuple[int, int, float]) -> None:
    """(step, attempt, value) each as a line."""
    lines = [{"axis": "train/step", "step": s, "attempt": a, "values": {"v": v}} for s, a, v in rows]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def read(path: Path) -> list[tuple[int, float | str]]:
    return [(row.step, row.values["v"]) for row in read_rows(path)]


def test_later_line_of_a_step_amends_the_earlier(tmp_path: Path) -> None:
    write(tmp_path / "rows", (0, 1, 0.5), (1, 1, 0.25), (0, 1, 0.75))
    assert read(tmp_path / "rows") == [(0, 0.75), (1, 0.25)]


def test_newer_attempt_wins_wherever_its_line_stands(tmp_path: Path) -> None:
    write(tmp_path / "rows", (1, 2, 0.75), (1, 1, 0.5))
    assert read(tmp_path / "rows") == [(1, 0.75)]


def test_what_a_killed_attempt_did_beyond_the_newer_one_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "rows", (0, 1, 0.5), (1, 1, 0.5), (2, 1, 0.5), (1, 2, 0.75))
    assert read(tmp_path / "rows") == [(0, 0.5), (1, 0.75)]


def test_torn_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "rows", (0, 1, 0.5))
    with (tmp_path / "rows").open("ab") as file:
        file.write(b'[1]\n"x"\n\n{"axis": "train/step"}\n{"axis": "tr')
    assert read(tmp_path / "rows") == [(0, 0.5)]


def test_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path / "rows") == []
