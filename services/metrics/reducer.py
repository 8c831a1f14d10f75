"""From the parts of a row to the row: pure functions. Each number is reduced once, here.

What is merged first does not matter for the result (sums are added in the order of part and producer), so that the same
run gives the same rows, bit for bit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from furlong.records import AXES, Mean, Number, Value, combine, decode_value, encode_number, encode_values, reduce_value

MAX_NAME_CHARS = 512


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
    bad_values: tuple[str, ...] = ()
    """Why values were left out."""


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
    """A metrics record as a part. Raises ValueError when it has no place in any row; a bad value is only left out."""
    run, axis = record.get("run", ""), record.get("axis")
    part, parts = record.get("part"), record.get("parts")
    if not isinstance(run, str) or axis not in AXES:
        raise ValueError(f"axis must be one of {', '.join(AXES)}, got {axis!r:.100}")
    if not isinstance(part, str) or not isinstance(parts, list) or not all(isinstance(p, str) for p in parts):
        raise ValueError(f"part must be a string and parts a list of strings, got {part!r:.100}, {parts!r:.100}")
    step, attempt = _integer(record, "step"), _integer(record, "attempt", default=1)
    rollout_id = _integer(record, "rollout_id") if record.get("rollout_id") is not None else None
    given = record.get("values")
    if not isinstance(given, dict):
        raise ValueError(f"values must be an object, got {type(given).__name__}")
    values, bad = _read_values(given)
    return Part(RowKey(run, str(axis), step, attempt), part, tuple(parts), rollout_id, values, tuple(bad))


def merge(step: Step, part: Part, *, producer: str, incarnation: int) -> list[str]:
    """Add a part to a row in the making; what was wrong with it.

    A later start of the same producer says its part anew: what its earlier start said no longer counts.
    """
    step.expected |= {part.part, *part.parts}
    step.rollout_id = part.rollout_id if part.rollout_id is not None else step.rollout_id
    place = (part.part, producer)
    known = step.contributions.get(place)
    problems = list(part.bad_values)
    if known is not None and known.incarnation > incarnation:
        return [*problems, f"{producer} said its part again since; an older record came late"]
    if known is None or known.incarnation < incarnation:
        step.contributions[place] = Contribution(incarnation, dict(part.values))
        return problems
    for name, value in part.values.items():
        _combine_into(known.values, name, value, problems)
    return problems


def reduce_step(step: Step) -> tuple[dict[str, Number | str], list[str]]:
    """The row's values, in the order of their names, and the conflicts between its parts.

    A mean of nothing gives no value. A number that is not finite is the string for it, counted in `NAME/nonfinite`.
    """
    merged: dict[str, Value] = {}
    nonfinite: dict[str, int] = {}
    problems: list[str] = []
    for place in sorted(step.contributions):
        for name, value in step.contributions[place].values.items():
            nonfinite[name] = nonfinite.get(name, 0) + (not _is_finite(value))
            _combine_into(merged, name, value, problems)
    row: dict[str, Number | str] = {}
    for name, value in merged.items():
        number = reduce_value(value)
        if number is None:
            continue
        row[name] = encode_number(number)
        if not math.isfinite(number) or nonfinite[name]:
            row[f"{name}/nonfinite"] = max(1, nonfinite[name])
    return dict(sorted(row.items())), problems


def row_line(step: Step, *, complete: bool, amends: bool) -> tuple[bytes, list[str]]:
    """The row as the JSON line that sinks get, and the conflicts between its parts."""
    values, problems = reduce_step(step)
    key = step.key
    row: dict[str, object] = {"run": key.run, "axis": key.axis, "step": key.step, "attempt": key.attempt}
    if step.rollout_id is not None:
        row["rollout_id"] = step.rollout_id
    row["complete"] = complete
    if amends:
        row["amends"] = True
    row["values"] = values
    return orjson.dumps(row), problems


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


def _read_values(given: Mapping[str, object]) -> tuple[dict[str, Value], list[str]]:
    values: dict[str, Value] = {}
    bad: list[str] = []
    for name, encoded in given.items():
        try:
            if len(name) > MAX_NAME_CHARS:
                raise ValueError(f"a name has at most {MAX_NAME_CHARS} characters, got {len(name)}")
            values[name] = decode_value(encoded)
        except ValueError as error:
            bad.append(f"{name:.100}: {error}")
    return values, bad


def _integer(record: Mapping[str, object], key: str, *, default: int | None = None) -> int:
    value = record.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**62) < value < 2**62:
        raise ValueError(f"{key} must be an integer, got {value!r:.100}")
    return value


def _is_finite(value: Value) -> bool:
    return math.isfinite(value.sum) if isinstance(value, Mean) else math.isfinite(value.value)
