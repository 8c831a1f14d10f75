"""Reads metrics.jsonl, the rows of a run, as another process writes them. A torn or foreign line is skipped."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True)
class Row:
    """One aggregated step of one axis."""

    axis: str
    step: int
    attempt: int
    values: dict[str, float | str] = field(default_factory=dict)
    """Numbers; those that JSON cannot write are "NaN", "Infinity" or "-Infinity"."""


def read_rows(path: Path) -> list[Row]:
    """The newest attempt's last line of each (axis, step), in the order of steps. A missing file has none.

    What a killed attempt left incomplete may be written after the attempt that repeated it. What it did after the step
    that a newer attempt went on from is not part of the run, and left out.
    """
    newest: dict[tuple[str, int], Row] = {}
    for row in _rows(path):
        known = newest.get((row.axis, row.step))
        if known is None or row.attempt >= known.attempt:
            newest[row.axis, row.step] = row
    return list(_without_abandoned(newest[key] for key in sorted(newest)))


def _without_abandoned(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows in order, without those of an attempt that a newer one took over from at an earlier step."""
    attempts: dict[str, int] = {}
    for row in rows:
        if row.attempt >= attempts.get(row.axis, 0):
            attempts[row.axis] = row.attempt
            yield row


def _rows(path: Path) -> Iterator[Row]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                tree: Any = orjson.loads(line)  # Any: a line of a file, told apart below
                yield Row(tree["axis"], int(tree["step"]), int(tree.get("attempt", 1)), dict(tree["values"]))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
                continue
