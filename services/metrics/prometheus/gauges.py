"""The newest value of every key of every run, under names that Prometheus allows. Pure; bounded.

`train/loss` is `furlong_train_loss{run="arith",key="train/loss"}`: what a name cannot hold becomes `_`, and the label
`key` has the raw name, so that two names that fold into one are told apart. A key that a run has on several axes has a
label `axis` besides. A value stands until a newer one comes, its step is taken back by a newer attempt, or its run has
been silent for stale_after_s.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from services.metrics.sinks.drawn import Drawn

MAX_SERIES = 50_000
PREFIX = "furlong_"
OWN = re.compile(r"furlong_(metrics|alert|row|build|process)_")
"""What begins so is about the service; a key that would is put behind `furlong_key_`."""
ENGINE_AXIS = "engine/time"
TIME_AXES = (ENGINE_AXIS, "router/time")
"""Their rows come every few seconds whatever training does: silence means that nobody is there."""
TIME_STALE_S = 120.0
_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True)
class Series:
    """What a value is called."""

    name: str
    labels: tuple[tuple[str, str], ...]


@dataclass
class _Value:
    place: tuple[int, int]
    """Attempt and step."""
    number: float
    seen_at: float


@dataclass
class _Axis:
    attempt: int = 0
    step: int = 0
    time_us: int = 0
    values: dict[str, _Value] = field(default_factory=dict)


class Gauges:
    """Fed with rows in order; says what stands."""

    def __init__(self, *, stale_after_s: float) -> None:
        self.num_left_out = 0
        """Values that were not taken since there are MAX_SERIES."""
        self._stale_after_s = stale_after_s
        self._runs: dict[str, dict[str, _Axis]] = {}
        self._num_series = 0

    def take(self, rows: Iterable[Drawn]) -> None:
        """Rows that are current, in the order in which they were handed on."""
        for row in rows:
            axis = self._runs.setdefault(row.run, {}).setdefault(row.axis, _Axis())
            if row.attempt > axis.attempt:
                self._take_back(axis, row.step)
            if (row.attempt, row.step) >= (axis.attempt, axis.step):
                axis.attempt, axis.step, axis.time_us = row.attempt, row.step, row.time_us
            for key, number in row.values.items():
                self._put(axis, key, _Value((row.attempt, row.step), number, row.time_us / 1e6))

    def forget_stale(self, now: float) -> None:
        """Drop what has not been heard of for too long, now being in seconds since the epoch."""
        for run, axes in list(self._runs.items()):
            newest = max(axis.time_us for axis in axes.values()) / 1e6
            if now - newest > self._stale_after_s:
                self._num_series -= sum(len(axis.values) for axis in axes.values())
                del self._runs[run]
                continue
            for name in TIME_AXES:
                if name in axes:
                    self._drop(axes[name], lambda value: now - value.seen_at > TIME_STALE_S)

    def standing(self) -> Iterator[tuple[Series, float]]:
        """Every value."""
        for run, axes in self._runs.items():
            seen = Counter(key for axis in axes.values() for key in axis.values)
            for name, axis in axes.items():
                for key, value in axis.values.items():
                    yield series_of(run, name, key, with_axis=seen[key] > 1), value.number

    def places(self) -> Iterator[tuple[str, str, int, int, float]]:
        """Run, axis, step, attempt and time (seconds since the epoch) of each axis' newest row."""
        for run, axes in self._runs.items():
            for name, axis in axes.items():
                yield run, name, axis.step, axis.attempt, axis.time_us / 1e6

    @property
    def num_series(self) -> int:
        """How many values stand."""
        return self._num_series

    def _put(self, axis: _Axis, key: str, value: _Value) -> None:
        known = axis.values.get(key)
        if known is None:
            if self._num_series >= MAX_SERIES:
                self.num_left_out += 1
                return
            self._num_series += 1
        elif known.place > value.place:
            return  # late, of an older step
        axis.values[key] = value

    def _take_back(self, axis: _Axis, step: int) -> None:
        """A new attempt begins at a step: what older ones said from there on is no longer true."""
        self._drop(axis, lambda value: value.place[1] >= step)

    def _drop(self, axis: _Axis, is_over: Callable[[_Value], bool]) -> None:
        over = [key for key, value in axis.values.items() if is_over(value)]
        for key in over:
            del axis.values[key]
        self._num_series -= len(over)


def series_of(run: str, axis: str, key: str, *, with_axis: bool) -> Series:
    """Name and labels of a value. Keys of engines (engine/INSTANCE/KEY) have their instance as a label instead."""
    name, labels = key, [("run", run), ("key", key)]
    parts = key.split("/", 2)
    if axis == ENGINE_AXIS and len(parts) == 3 and parts[0] == "engine":
        name = f"engine/{parts[2]}"
        labels.append(("engine", parts[1]))
    if with_axis:  # one series twice would cost the whole scrape
        labels.append(("axis", axis))
    return Series(fold(name), tuple(labels))


def fold(key: str) -> str:
    """A legal name that says the key."""
    plain = PREFIX + _FORBIDDEN.sub("_", key)
    return f"{PREFIX}key_{plain.removeprefix(PREFIX)}" if OWN.match(plain + "_") else plain
