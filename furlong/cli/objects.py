"""Histograms and tables for `furlong query`: a line a step, or a table's first rows; as JSON whole. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import orjson

from furlong.asking.objects import RowObject, Tree
from furlong.cli.lines import clean, number

MAX_ROWS = 20
"""Of a table; JSON has all."""
MAX_CELL_CHARS = 40

Groups = dict[tuple[str, str, str, str], list[RowObject]]


def as_json(objects: Iterable[RowObject]) -> list[str]:
    """One object a key, with its values whole."""
    lines = []
    for (run, axis, key, kind), items in _groups(objects).items():
        tree = {"run": run, "axis": axis, "key": key, "kind": kind}
        steps = {"steps": [item.step for item in items], "attempts": [item.attempt for item in items]}
        lines.append(orjson.dumps({**tree, **steps, "values": [item.value for item in items]}).decode())
    return lines


def as_text(objects: Iterable[RowObject], *, last: int | None) -> list[str]:
    """What each key is, and what is in it. last: steps of a table; None: the newest."""
    groups = _groups(objects)
    several_runs = len({run for run, *_ in groups}) > 1
    lines: list[str] = []
    for (run, axis, key, kind), items in groups.items():
        lines += [""] if lines else []
        lines += [f"run {clean(run)}"] if several_runs else []
        with_attempts = len({item.attempt for item in items}) > 1
        if kind == "histogram":
            lines.append(f"{clean(key)}, a histogram: values, range of its bins, mean as its bins tell it")
            head = [axis, *(["attempt"] if with_attempts else []), "n", "min", "max", "mean"]
            lines += aligned([head, *(_summary(item, with_attempts=with_attempts) for item in items)])
            continue
        for item in items[-(last or 1) :]:
            attempt = f", attempt {item.attempt}" if with_attempts else ""
            lines.append(f"{clean(key)}, a table, at {clean(axis)} {item.step}{attempt}")
            lines += _table(item.value)
    return lines


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells under one another, to the right."""
    shown = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]


def _groups(objects: Iterable[RowObject]) -> Groups:
    groups: Groups = defaultdict(list)
    for item in objects:
        groups[item.run, item.axis, item.key, item.kind].append(item)
    for items in groups.values():
        items.sort(key=lambda item: (item.step, item.attempt))
    return groups


def _summary(item: RowObject, *, with_attempts: bool) -> list[str]:
    edges, counts = item.value["edges"], item.value["counts"]
    filled = [index for index, count in enumerate(counts) if count]
    numbers = ["-", "-", "-"]
    if filled:
        middles = math.fsum(counts[at] * (edges[at] / 2 + edges[at + 1] / 2) for at in filled)
        mean = middles / math.fsum(counts)
        numbers = [number(value) for value in (edges[filled[0]], edges[filled[-1] + 1], mean)]
    attempt = [str(item.attempt)] if with_attempts else []
    return [str(item.step), *attempt, number(sum(counts)), *numbers]


def _table(value: Tree) -> list[str]:
    rows = value["rows"]
    shown = [[_cell(cell) for cell in row] for row in (value["columns"], *rows[:MAX_ROWS])]
    lines = aligned(shown)
    if len(rows) > MAX_ROWS:
        lines.append(f"and {len(rows) - MAX_ROWS} rows more, which --json shows")
    if value.get("cut"):
        lines.append("it was cut to what a table may hold")
    return lines


def _cell(cell: object) -> str:
    return "-" if cell is None else clean(number(cell), MAX_CELL_CHARS)
