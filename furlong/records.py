"""The records that travel to the metrics service: log lines, and numbers with their reduction.

A record is a JSON object (DESIGN: "Records"). A metrics record is one with `event: "metrics"`:

    {"ts": ..., "run": "arith", "service": "trainer", "instance": "trainer-0", "event": "metrics",
     "axis": "rollout/step", "step": 12, "attempt": 1, "part": "trainer", "parts": ["rollout", "trainer"],
     "values": {"perf/step_time": ["last", 0.93], "rollout/raw_reward": ["mean", 18.0, 32]}}

`values` holds the parts of a reduction, so that what several producers say of one step is reduced once, in the metrics
service. JSON has no NaN: a number that is not finite is written as the string "NaN", "Infinity" or "-Infinity".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import orjson

AXES = ("train/step", "rollout/step", "eval/step")

Encoded = list[Any]  # Any: ["mean", sum, count] or [kind, number]; numbers may be the strings for NaN and Infinity
Number = float | int


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


Value = Mean | Sum | Min | Max | Last

_KINDS: dict[str, type[Sum] | type[Min] | type[Max] | type[Last]] = {
    "sum": Sum,
    "min": Min,
    "max": Max,
    "last": Last,
}


def mean_of(numbers: Sequence[Number]) -> Mean:
    """The mean of numbers, as its parts."""
    return Mean(math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers), len(numbers))


def encode_values(values: Mapping[str, Value]) -> dict[str, Encoded]:
    """For JSON: each value as a list of its kind and numbers."""
    return {name: encode_value(value) for name, value in values.items()}


def encode_value(value: Value) -> Encoded:
    """["mean", sum, count], or [kind, number]."""
    if isinstance(value, Mean):
        return ["mean", encode_number(value.sum), encode_number(value.count)]
    if not isinstance(value, (Sum, Min, Max, Last)):
        raise TypeError(f"a value must be Mean, Sum, Min, Max or Last, got {type(value).__name__}")
    return [type(value).__name__.lower(), encode_number(value.value)]


def dump_values(encoded: object) -> bytes:
    """Encoded values as JSON."""
    return orjson.dumps(encoded)


def decode_value(encoded: object) -> Value:
    """The inverse of encode_value. Raises ValueError saying what is wrong."""
    if not isinstance(encoded, list) or not encoded:
        raise ValueError(f"a value must be a list such as ['last', 1.0], got {encoded!r:.100}")
    kind, *numbers = encoded
    if kind == "mean" and len(numbers) == 2:
        return Mean(decode_number(numbers[0]), decode_number(numbers[1]))
    if isinstance(kind, str) and kind in _KINDS and len(numbers) == 1:
        return _KINDS[kind](decode_number(numbers[0]))
    raise ValueError(f"a value must be ['mean', sum, count] or [{'|'.join(_KINDS)}, number], got {encoded!r:.100}")


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
        plain = float(number)
    if isinstance(plain, int):
        return plain if -(2**63) <= plain < 2**63 else float(plain)
    if math.isfinite(plain):
        return plain
    return "NaN" if math.isnan(plain) else ("Infinity" if plain > 0 else "-Infinity")


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
    """Two parts of one value as one. Raises ValueError when they are of different kinds."""
    if type(first) is not type(second):
        raise ValueError(f"one producer says {type(first).__name__}, another {type(second).__name__}")
    if isinstance(first, Mean) and isinstance(second, Mean):
        return Mean(first.sum + second.sum, first.count + second.count)
    if isinstance(first, Sum) and isinstance(second, Sum):
        return Sum(first.value + second.value)
    if isinstance(first, Min | Max) and isinstance(second, Min | Max):
        if math.isnan(first.value) or math.isnan(second.value):
            return type(first)(math.nan)
        return type(first)((min if isinstance(first, Min) else max)(first.value, second.value))
    return second


def reduce_value(value: Value) -> float | None:
    """The number that a value comes to. None: a mean of nothing."""
    if isinstance(value, Mean):
        return value.sum / value.count if value.count else None
    return value.value
