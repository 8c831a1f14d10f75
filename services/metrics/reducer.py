"""From the parts of a row to the row: pure functions. Each number is reduced once, here.

What is merged first does not matter for the result (sums are added in the order of part and producer), so that the same
run gives the same rows, bit for bit.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from furlong.records import (
    Histogram,
    Mean,
    Number,
    Table,
    Value,
    combine,
    decode_loose,
    decode_value,
    encode_number,
    encode_values,
    is_finite,
    reduce_value,
    row_form,
)

MAX_NAME_CHARS = 512
MAX_AXIS_CHARS = 128
_AXIS = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


@dataclass(frozen=True, order=True)
class RowKey:
    """What a row is about."""

    run: str
    axis: str
    step: int
    attempt: int


@dataclass(frozen=True)
class Part:
    """One producer's say on a row."""

    key: RowKey
    part: str
    parts: tuple[str, ...]
    rollout_id: int | None
    values: Mapping[str, Value]
    bad_values: Mapping[str, str] = field(default_factory=dict)
    """Names of values that were left out, and why."""


@dataclass
class Contribution:
    """What one producer said so far, all its records together."""

    incarnation: int
    values: dict[str, Value]


@dataclass
class Step:
    """A row in the making."""

    key: RowKey
    expected: set[str] = field(default_factory=set)
    rollout_id: int | None = None
    contributions: dict[tuple[str, str], Contribution] = field(default_factory=dict)
    """By part and producer."""

    @property
    def is_complete(self) -> bool:
        return self.expected <= {part for part, _ in self.contributions}


def read_part(record: Mapping[str, object]) -> Part:
    """A metrics record as a part. Raises ValueError when it has no place in any row; a bad value is only left out.

    Records of other programs may lack `part`, `parts` and `attempt`, name any axis, and give plain numbers.
    """
    run, axis = record.get("run", ""), record.get("axis")
    if not isinstance(run, str):
        raise ValueError(f"run must be a string, got {run!r:.100}")
    if not isinstance(axis, str) or len(axis) > MAX_AXIS_CHARS or not _AXIS.fullmatch(axis):
        rule = (
            f"axis must be names of letters, digits, '_', '.', '-' joined by '/', at most {MAX_AXIS_CHARS} characters"
        )
        raise ValueError(f"{rule}, got {axis!r:.100}")
    part = record.get("part", "main")
    parts = record.get("parts", [part])
    if not isinstance(part, str) or not isinstance(parts, list) or not all(isinstance(p, str) for p in parts):
        raise ValueError(f"part must be a string and parts a list of strings, got {part!r:.100}, {parts!r:.100}")
    step, attempt = _integer(record, "step"), _integer(record, "attempt", default=1)
    rollout_id = _integer(record, "rollout_id") if record.get("rollout_id") is not None else None
    given = record.get("values")
    if not isinstance(given, dict):
        raise ValueError(f"values must be an object, got {type(given).__name__}")
    values, bad = _read_values(given)
    return Part(RowKey(run, axis, step, attempt), part, tuple(parts), rollout_id, values, bad)


def merge(step: Step, part: Part, *, producer: str, incarnation: int) -> list[str]:
    """Add a part to a row in the making; what was wrong with it.

    A later start of the same producer says its part anew: what its earlier start said no longer counts.
    """
    step.expected |= {part.part, *part.parts}
    step.rollout_id = part.rollout_id if part.rollout_id is not None else step.rollout_id
    place = (part.part, producer)
    known = step.contributions.get(place)
    problems: list[str] = []
    if known is not None and known.incarnation > incarnation:
        return [f"{producer} said its part again since; an older record came late"]
    if known is None or known.incarnation < incarnation:
        step.contributions[place] = Contribution(incarnation, dict(part.values))
        return problems
    for name, value in part.values.items():
        _combine_into(known.values, name, value, problems)
    return problems


@dataclass(frozen=True)
class Reduced:
    """What a row comes to."""

    values: dict[str, Number | str]
    """In the order of their names."""
    histograms: dict[str, dict[str, object]]
    tables: dict[str, dict[str, object]]
    problems: list[str]
    """Conflicts between its parts."""


def reduce_step(step: Step) -> Reduced:
    """A mean of nothing gives no value. A number that is not finite is the string for it, counted in
    `NAME/nonfinite`.
    """
    merged: dict[str, Value] = {}
    nonfinite: dict[str, int] = {}
    problems: list[str] = []
    for place in sorted(step.contributions):
        for name, value in step.contributions[place].values.items():
            if not is_finite(value):
                nonfinite[name] = nonfinite.get(name, 0) + max(1, getattr(value, "num_nonfinite", 1))
            _combine_into(merged, name, value, problems)
    row: dict[str, Number | str] = {}
    for name, value in merged.items():
        number = reduce_value(value)
        if number is not None:
            row[name] = encode_number(number)
            if not math.isfinite(number):
                nonfinite.setdefault(name, 1)
    row |= {f"{name}/nonfinite": count for name, count in nonfinite.items() if _is_shown(merged[name])}
    histograms = {name: row_form(value) for name, value in sorted(merged.items()) if isinstance(value, Histogram)}
    tables = {name: row_form(value) for name, value in sorted(merged.items()) if isinstance(value, Table)}
    return Reduced(dict(sorted(row.items())), histograms, tables, problems)


def row_line(step: Step, *, complete: bool, amends: bool) -> tuple[bytes, list[str]]:
    """The row as the JSON line that sinks get, and the conflicts between its parts."""
    reduced = reduce_step(step)
    key = step.key
    row: dict[str, object] = {"run": key.run, "axis": key.axis, "step": key.step, "attempt": key.attempt}
    if step.rollout_id is not None:
        row["rollout_id"] = step.rollout_id
    row["complete"] = complete
    if amends:
        row["amends"] = True
    row["values"] = reduced.values
    if reduced.histograms:
        row["histograms"] = reduced.histograms
    if reduced.tables:
        row["tables"] = reduced.tables
    return orjson.dumps(row), reduced.problems


def dump_contribution(contribution: Contribution) -> bytes:
    """For the store."""
    return orjson.dumps(encode_values(contribution.values))


def load_contribution(incarnation: int, body: bytes) -> Contribution:
    """The inverse of dump_contribution."""
    return Contribution(incarnation, {name: decode_value(item) for name, item in orjson.loads(body).items()})


def _combine_into(values: dict[str, Value], name: str, value: Value, problems: list[str]) -> None:
    if name not in values:
        values[name] = value
        return
    try:
        values[name] = combine(values[name], value)
    except ValueError as error:
        problems.append(f"{name}: {error}; the first is kept")


def _read_values(given: Mapping[str, object]) -> tuple[dict[str, Value], dict[str, str]]:
    values: dict[str, Value] = {}
    bad: dict[str, str] = {}
    for name, encoded in given.items():
        if len(name) > MAX_NAME_CHARS:
            bad[name[:100]] = f"a name has at most {MAX_NAME_CHARS} characters, got {len(name)}"
        elif (value := decode_loose(encoded)) is None:
            bad[name] = f"is no number and no value: {encoded!r:.100}"
        elif isinstance(value, Mean) and not 0 <= value.count < math.inf:
            bad[name] = f"is a mean over less than nothing, or over no number: {encoded!r:.100}"
        else:
            values[name] = value
    return values, bad


def _integer(record: Mapping[str, object], key: str, *, default: int | None = None) -> int:
    value = record.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**62) < value < 2**62:
        raise ValueError(f"{key} must be an integer, got {value!r:.100}")
    return value


def _is_shown(value: Value) -> bool:
    return isinstance(value, Histogram) or reduce_value(value) is not None
