"""The records that travel to the metrics service: log lines, and numbers with their reduction.

A record is a JSON object (DESIGN: "Records"). A metrics record is one with `event: "metrics"`:

    {"ts": ..., "run": "arith", "service": "trainer", "instance": "trainer-0", "event": "metrics",
     "axis": "rollout/step", "step": 12, "attempt": 1, "part": "trainer", "parts": ["rollout", "trainer"],
     "values": {"perf/step_time": ["last", 0.93], "rollout/raw_reward": ["mean", 18.0, 32]}}

`values` holds the parts of a reduction, so that what several producers say of one step is reduced once, in the metrics
service. JSON has no NaN: a number that is not finite is written as the string "NaN", "Infinity" or "-Infinity".
Besides numbers a value may be a distribution, `["histogram", [edges], [counts]]`, or a few rows, `["table", [columns],
[[cells]]]`; both are bounded here, so that none can grow a record or a row without end.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, SupportsFloat, SupportsIndex

import orjson

AXES = ("train/step", "rollout/step", "eval/step", "engine/time", "router/time")
MAX_BINS = 512
MAX_COLUMNS = 64
MAX_ROWS = 1_000
MAX_TABLE_BYTES = 256 * 1024

Encoded = list[Any]  # Any: ["mean", sum, count] or [kind, number]; numbers may be the strings for NaN and Infinity
Number = float | int
Cell = str | float | int | bool | None


@dataclass(frozen=True)
class Mean:
    """A mean as sum and count. A count of 0 gives no value."""

    sum: float
    count: float


@dataclass(frozen=True)
class Sum:
    """Adds up over all parts."""

    value: Number


@dataclass(frozen=True)
class Min:
    """The smallest of all parts."""

    value: Number


@dataclass(frozen=True)
class Max:
    """The largest of all parts."""

    value: Number


@dataclass(frozen=True)
class Last:
    """A value that one producer knows whole; the newest wins."""

    value: Number


@dataclass(frozen=True)
class Histogram:
    """How numbers are spread: counts[i] of them lie from edges[i] up to, not with, edges[i + 1]; the last bin has both.

    Parts with equal edges add up. Raises ValueError when edges do not ascend, a count is negative or one is missing.
    """

    edges: tuple[Number, ...]
    counts: tuple[Number, ...]
    num_nonfinite: int = 0
    """NaN and Infinity among the numbers; they are in no bin."""

    def __post_init__(self) -> None:
        edges, counts = tuple(self.edges), tuple(self.counts)  # arrays are taken too
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "counts", counts)
        if not 1 <= len(counts) <= MAX_BINS or len(edges) != len(counts) + 1:
            rule = f"a histogram has 1 to {MAX_BINS} counts and one edge more"
            raise ValueError(f"{rule}, got {len(counts)} and {len(edges)}")
        if not all(map(math.isfinite, edges)) or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"the edges of a histogram must be finite and ascend, got {list(edges)!r:.100}")
        if not all(math.isfinite(count) and count >= 0 for count in (*counts, self.num_nonfinite)):
            raise ValueError(f"the counts of a histogram must be finite and not negative, got {list(counts)!r:.100}")


@dataclass(frozen=True)
class Table:
    """A few rows under named columns. Parts with the same columns follow each other.

    More than MAX_ROWS rows or MAX_TABLE_BYTES bytes are cut off, and `cut` says so. Raises ValueError when a row has
    not as many cells as there are columns.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    cut: bool = False

    def __post_init__(self) -> None:
        columns = self.columns
        if not 1 <= len(columns) <= MAX_COLUMNS or len(set(columns)) != len(columns):
            raise ValueError(f"a table has 1 to {MAX_COLUMNS} columns with different names, got {len(columns)}")
        if not all(isinstance(name, str) for name in columns) or len(orjson.dumps(columns)) > MAX_TABLE_BYTES // 4:
            raise ValueError(f"the columns of a table must be short strings, got {columns!r:.100}")
        size, kept = 0, []
        for row in self.rows[:MAX_ROWS]:
            if len(row) != len(columns):
                raise ValueError(f"a row has a cell for each of {len(columns)} columns, got {len(row)}")
            cells = tuple(map(_cell, row))
            size += len(orjson.dumps(cells)) + 1
            if size > MAX_TABLE_BYTES:
                break
            kept.append(cells)
        object.__setattr__(self, "cut", self.cut or len(kept) < len(self.rows))
        object.__setattr__(self, "rows", tuple(kept))


Scalar = Mean | Sum | Min | Max | Last
Value = Scalar | Histogram | Table

_MAX_INTEGER = 2**63

_KINDS: dict[str, type[Sum] | type[Min] | type[Max] | type[Last]] = {
    "sum": Sum,
    "min": Min,
    "max": Max,
    "last": Last,
}


def mean_of(numbers: Sequence[Number]) -> Mean:
    """The mean of numbers, as its parts."""
    return Mean(math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers), len(numbers))


def histogram_of(numbers: Iterable[SupportsFloat], num_bins: int = 32) -> Histogram | None:
    """How the numbers are spread over num_bins bins of equal width, from the smallest to the largest.

    None: not one of them is finite. Equal numbers give a bin around them.
    """
    given = [float(number) for number in numbers]
    finite = [number for number in given if math.isfinite(number)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    edges = [low * (1 - at / num_bins) + high * (at / num_bins) for at in range(num_bins)] + [high]
    if any(a >= b for a, b in pairwise(edges)):  # equal, or as near as floats can be
        margin = max(0.5, math.ulp(low), math.ulp(high))
        edges = [low - margin, high + margin] if math.isfinite(low - margin) and math.isfinite(high + margin) else []
    if not edges:  # at the ends of what a float can hold
        edges = [min(low, 0.0), max(high, 0.0)]
    counts = [0] * (len(edges) - 1)
    for number in finite:
        counts[min(bisect_right(edges, number) - 1, len(counts) - 1)] += 1
    return Histogram(tuple(edges), tuple(counts), len(given) - len(finite))


def encode_values(values: Mapping[str, Value]) -> dict[str, Encoded]:
    """For JSON: each value as a list of its kind and numbers."""
    return {name: encode_value(value) for name, value in values.items()}


def encode_all(values: Mapping[str, Value], *, refuse: Callable[[str, Exception], None]) -> dict[str, Encoded]:
    """For JSON: each value as a list of its kind and numbers. A number without a kind is the last one.

    refuse: told of each value that is left out, and why. The usual kinds take no call each: a row has many values.
    """
    encoded: dict[str, Encoded] = {}
    isfinite = math.isfinite
    for name, value in values.items():
        kind = type(value)
        if kind is Last:
            number = value.value  # type: ignore[union-attr]
            if (type(number) is float and isfinite(number)) or (type(number) is int and abs(number) < _MAX_INTEGER):
                encoded[name] = ["last", number]
                continue
        elif kind is Mean:
            total, count = value.sum, value.count  # type: ignore[union-attr]
            if type(total) is float and isfinite(total) and type(count) is int and 0 <= count < _MAX_INTEGER:
                encoded[name] = ["mean", total, count]
                continue
        try:
            encoded[name_of(name)] = encode_value(value) if isinstance(value, Value) else ["last", encode_number(value)]
        except (ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
            refuse(name_of(name), error)
    return encoded


def encode_value(value: Value) -> Encoded:
    """["mean", sum, count], [kind, number], ["histogram", edges, counts] or ["table", columns, rows].

    The last two have a fourth entry when there is something to tell: the count of numbers that are not finite; true
    when rows were cut off.
    """
    if isinstance(value, Mean):
        return ["mean", encode_number(value.sum), encode_number(value.count)]
    if isinstance(value, Histogram):
        encoded = ["histogram", list(map(encode_number, value.edges)), list(map(encode_number, value.counts))]
        return [*encoded, value.num_nonfinite] if value.num_nonfinite else encoded
    if isinstance(value, Table):
        return ["table", list(value.columns), [list(row) for row in value.rows], *([True] if value.cut else [])]
    if not isinstance(value, (Sum, Min, Max, Last)):
        kinds = "Mean, Sum, Min, Max, Last, Histogram or Table"
        raise TypeError(f"a value must be {kinds}, got {type(value).__name__}")
    return [type(value).__name__.lower(), encode_number(value.value)]


def decode_value(encoded: object) -> Value:
    """The inverse of encode_value. Raises ValueError saying what is wrong."""
    if not isinstance(encoded, list) or not encoded:
        raise ValueError(f"a value must be a list such as ['last', 1.0], got {encoded!r:.100}")
    kind, *rest = encoded
    if kind == "mean" and len(rest) == 2:
        return Mean(decode_number(rest[0]), decode_number(rest[1]))
    if isinstance(kind, str) and kind in _KINDS and len(rest) == 1:
        return _KINDS[kind](decode_number(rest[0]))
    lists = [entry for entry in rest[:2] if isinstance(entry, list)]
    if kind in ("histogram", "table") and len(lists) == 2 and len(rest) <= 3:
        return _decode_lists(kind, lists[0], lists[1], rest[2:])
    kinds = (
        f"['mean', sum, count], [{'|'.join(_KINDS)}, number], ['histogram', edges, counts] or ['table', columns, rows]"
    )
    raise ValueError(f"a value must be {kinds}, got {encoded!r:.100}")


def _decode_lists(kind: str, first: list[object], second: list[object], more: list[object]) -> Value:
    try:
        if kind == "histogram":
            edges, counts = (tuple(map(decode_number, numbers)) for numbers in (first, second))
            return Histogram(edges, counts, int(decode_number(more[0])) if more else 0)
        if not all(isinstance(row, list) for row in second):
            raise ValueError(f"the rows of a table must be lists, got {second!r:.100}")
        return Table(tuple(first), tuple(map(tuple, second)), cut=bool(more and more[0]))  # type: ignore[arg-type]
    except (TypeError, OverflowError) as error:
        raise ValueError(f"no {kind}: {error}") from error


def decode_loose(given: object) -> Value | None:
    """A value as other programs write them too: a plain number counts as the last one. None: it is no value.

    Never raises, whatever JSON can hold.
    """
    try:
        if isinstance(given, list):
            return decode_value(given)
        return Last(int(given)) if isinstance(given, bool) else Last(decode_number(given))
    except (ValueError, TypeError, OverflowError):
        return None


def row_form(value: Histogram | Table) -> dict[str, object]:
    """How a distribution or a table stands in a row's JSON."""
    if isinstance(value, Histogram):
        return {"edges": list(map(encode_number, value.edges)), "counts": list(map(encode_number, value.counts))}
    shown: dict[str, object] = {"columns": list(value.columns), "rows": [list(row) for row in value.rows]}
    return {**shown, "cut": True} if value.cut else shown


def encode_number(number: SupportsFloat) -> Number | str:
    """The number itself, or the string that stands for a NaN or an Infinity.

    Scalars of numpy and torch are taken too. Raises TypeError or ValueError for what is no single number.
    """
    if isinstance(number, (str, bytes, bytearray)):  # float() would read them
        raise TypeError(f"not a number: {number!r:.100}")
    plain: Number
    if isinstance(number, (int, float)):
        plain = int(number) if isinstance(number, int) else float(number)
    else:
        plain = _exact(number)
    if isinstance(plain, int):
        return plain if -_MAX_INTEGER <= plain < _MAX_INTEGER else float(plain)
    if math.isfinite(plain):
        return plain
    return "NaN" if math.isnan(plain) else ("Infinity" if plain > 0 else "-Infinity")


def _exact(number: SupportsFloat) -> Number:
    """Of another library's scalar; an integer beyond 2**53 is not rounded to a float."""
    rounded = float(number)
    if not isinstance(number, SupportsIndex) or abs(rounded) < 2**53:
        return rounded
    try:
        return operator.index(number)
    except TypeError:  # a tensor of floats has the method, too
        return rounded


def decode_number(number: object) -> Number:
    """The inverse of encode_number. Raises ValueError."""
    if isinstance(number, bool) or not isinstance(number, (int, float, str)):
        raise ValueError(f"not a number: {number!r:.100}")
    if isinstance(number, str):
        if number not in ("NaN", "Infinity", "-Infinity"):
            raise ValueError(f"not a number: {number!r:.100}")
        return float(number)
    return number


def combine(first: Value, second: Value) -> Value:
    """Two parts of one value as one. Raises ValueError when they are of different kinds, edges or columns."""
    if type(first) is not type(second):
        raise ValueError(f"one producer says {type(first).__name__}, another {type(second).__name__}")
    if isinstance(first, Mean) and isinstance(second, Mean):
        return Mean(first.sum + second.sum, first.count + second.count)
    if isinstance(first, Sum) and isinstance(second, Sum):
        return Sum(first.value + second.value)
    if isinstance(first, Histogram) and isinstance(second, Histogram):
        if first.edges != second.edges:
            raise ValueError("two histograms have different edges")
        counts = tuple(a + b for a, b in zip(first.counts, second.counts, strict=True))
        return Histogram(first.edges, counts, first.num_nonfinite + second.num_nonfinite)
    if isinstance(first, Table) and isinstance(second, Table):
        if first.columns != second.columns:
            raise ValueError("two tables have different columns")
        return Table(first.columns, first.rows + second.rows, cut=first.cut or second.cut)
    if isinstance(first, Min | Max) and isinstance(second, Min | Max):
        if math.isnan(first.value) or math.isnan(second.value):
            return type(first)(math.nan)
        return type(first)((min if isinstance(first, Min) else max)(first.value, second.value))
    return second


def reduce_value(value: Value) -> float | None:
    """The number that a value comes to. None: a mean of nothing, or no number but a distribution or a table."""
    if isinstance(value, Mean):
        return value.sum / value.count if value.count else None
    return None if isinstance(value, (Histogram, Table)) else value.value


def is_finite(value: Value) -> bool:
    """Whether all numbers of a value are. A table's are only shown."""
    if isinstance(value, Histogram):
        return not value.num_nonfinite
    return isinstance(value, Table) or math.isfinite(value.sum if isinstance(value, Mean) else value.value)


def name_of(name: object) -> str:
    """A name that JSON can hold."""
    return str(name).encode("utf-8", "replace").decode()


def _cell(cell: object) -> Cell:
    if cell is None or isinstance(cell, (bool, str)):
        return cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell
    return encode_number(cell)  # type: ignore[arg-type]  # raises for what is no number
