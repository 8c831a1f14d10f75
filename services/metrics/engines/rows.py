"""What lines and endpoints say of the engines, gathered to one metrics record an interval, on the axis `engine/time`.

A step is the whole second in which its interval ends; what a line says belongs to the interval of the line's own time,
so that a backlog makes the rows that it would have made when it was written. An interval without news makes no record.
Used by one thread; knows no store.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping

import orjson
import structlog

from furlong.records import Value, combine, decode_value, encode_value

log = structlog.get_logger()

MAX_SERIES = 1_000
"""Of one instance, for as long as it is remembered. A page of SGLang's is about 150."""
MAX_INSTANCES = 256
"""That are remembered: those that were heard of last. Engines of Ray have a new name at every start."""
MAX_VALUES = 10_000
"""Of one record, which must not become too large for the store."""
MAX_INTERVALS = 256
"""Intervals that are open at once: a backlog has many."""
MAX_AHEAD_S = 60.0
"""A time further in the future is a clock that is wrong: now counts instead."""
_CLOSE_AFTER_S = 0.5


class EngineRows:
    """The intervals that are not over."""

    def __init__(self, *, run: str, interval_s: float) -> None:
        self._run, self._interval_s = run, max(1.0, interval_s)
        self._open: dict[int, dict[str, Value]] = {}
        self._of_lines: dict[int, set[str]] = {}
        """Of each interval, what lines have said."""
        self._series: OrderedDict[str, set[str]] = OrderedDict()
        """By instance, the one that was heard of last behind the others."""
        self._is_told = False
        self.num_left_out = 0
        """Values beyond the bounds, and those that say a thing in another way than one before."""

    def add(
        self, instance: str, at_s: float, values: Mapping[str, Value], *, now_s: float, from_line: bool = True
    ) -> None:
        """Values of one instance; several of one interval are reduced together."""
        if at_s > now_s + MAX_AHEAD_S:
            at_s = now_s
        step = math.ceil(math.floor(at_s / self._interval_s + 1) * self._interval_s)
        row = self._open.setdefault(step, {})
        series = self._series_of(instance)
        for name, value in values.items():
            key = f"engine/{instance}/{name}"
            if key not in row and not self._may_begin(key, series, row):
                continue
            if from_line:
                self._of_lines.setdefault(step, set()).add(key)
            known = row.get(key)
            try:
                row[key] = value if known is None else combine(known, value)
            except ValueError:  # a line and an endpoint say it in different ways: the first is kept
                self.num_left_out += 1

    def due(self, now_s: float, *, everything: bool = False) -> list[bytes]:
        """The records of the intervals that are over, oldest first."""
        over = [step for step in self._open if everything or step + _CLOSE_AFTER_S <= now_s]
        if len(self._open) - len(over) > MAX_INTERVALS:
            over = sorted(self._open)[: len(self._open) - MAX_INTERVALS]
        rows = {step: self._open.pop(step) for step in sorted(over)}
        for step in rows:
            self._of_lines.pop(step, None)
        return [self._record(step, row) for step, row in rows.items() if row]

    @property
    def has_lines(self) -> bool:
        """Whether what lines have said waits."""
        return bool(self._of_lines)

    def dump(self) -> bytes:
        """For a mark: what was taken of lines that are done with, and stands in no record yet. What an endpoint said
        is not in it: there is much of it, often, and a restart costs no more than one reading."""
        return orjson.dumps(
            {
                str(step): {key: encode_value(self._open[step][key]) for key in sorted(keys)}
                for step, keys in self._of_lines.items()
            }
        )

    def load(self, body: bytes) -> None:
        """The inverse of dump. What cannot be read is left out."""
        try:
            given = orjson.loads(body)
            self._open = {
                int(step): {key: decode_value(value) for key, value in row.items()} for step, row in given.items()
            }
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("engine_rows_not_restored", error=str(error))
            self._open = {}
        self._of_lines = {step: set(row) for step, row in self._open.items()}

    def _series_of(self, instance: str) -> set[str]:
        series = self._series.setdefault(instance, set())
        self._series.move_to_end(instance)
        if len(self._series) > MAX_INSTANCES:
            self._series.popitem(last=False)
        return series

    def _may_begin(self, key: str, series: set[str], row: Mapping[str, Value]) -> bool:
        if len(row) < MAX_VALUES and (key in series or len(series) < MAX_SERIES):
            series.add(key)
            return True
        if not self._is_told:
            log.warning("engine_series_limit", of_one=MAX_SERIES, of_all=MAX_VALUES, first_left_out=key)
        self._is_told = True
        self.num_left_out += 1
        return False

    def _record(self, step: int, row: dict[str, Value]) -> bytes:
        return orjson.dumps(
            {
                "event": "metrics",
                "level": "debug",
                "run": self._run,
                "service": "metrics",
                "axis": "engine/time",
                "step": step,
                "attempt": 1,
                "part": "engines",
                "parts": ["engines"],
                "values": {key: encode_value(value) for key, value in sorted(row.items())},
            }
        )
