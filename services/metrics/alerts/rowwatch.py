"""Watches one rule over the rows of one run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from furlong.alertrules import Rule
from services.metrics.alerts.alert import Alert, State, plain, shown
from services.metrics.alerts.hysteresis import Hysteresis
from services.metrics.alerts.judging import Judgement, judge
from services.metrics.alerts.reading import read
from services.metrics.alerts.window import Point, Window

NUM_SHOWN = 10
"""Points in the evidence."""


@dataclass(frozen=True)
class RowFacts:
    """A row, as rules see it."""

    run: str
    axis: str
    step: int
    attempt: int
    values: Mapping[str, float]
    at_us: int


_NONE: Mapping[str, float] = {}


class RowWatch:
    """The state of one rule in one run. `take` is the only way in."""

    def __init__(self, rule: Rule, *, halt: bool) -> None:
        self.rule = rule
        self.hysteresis = Hysteresis(rule.rows, rule.resolve_rows, rule.cool_down_rows)
        self._halt = halt
        self._window = Window(int(max(rule.numbers.get("window", 0), rule.numbers.get("still_rows", 0), 50)))
        self._axis = rule.axis

    def take(self, row: RowFacts) -> Alert | None:
        """The change that the row makes, if any."""
        if row.attempt < self._window.attempt or (self._axis and row.axis != self._axis):
            return None
        if self.rule.kind == "missing":
            return self._take_missing(row)
        value = self._value(row)
        if value is None:
            return None
        self._axis = self._axis or row.axis  # the key's own: a rule looks at one curve
        self._begin_attempt(row)
        if not self._window.is_new(row.step):
            return None
        several = len(self.rule.keys) > 1
        kept = {key: row.values[key] for key in self.rule.keys if key in row.values} if several else _NONE
        self._window.add(Point(row.step, value, kept))
        found = judge(self.rule, self._window, self.hysteresis.num_bad)
        return None if found is None else self._see(row, value, found)

    def _value(self, row: RowFacts) -> float | None:
        if self.rule.kind == "nonfinite":  # any of its keys will do
            present = [row.values[key] for key in self.rule.keys if key in row.values]
            return present[0] if present else None
        return read(self.rule, row.values)

    def _take_missing(self, row: RowFacts) -> Alert | None:
        """A key that was there, or whose axis is given, and is not in a row of that axis."""
        present = self.rule.keys[0] in row.values
        if present:
            self._axis = self._axis or row.axis
        if not self._axis:
            return None
        self._begin_attempt(row)
        if not self._window.is_new(row.step):
            return None
        what = f"missing in the row at {row.axis} {row.step}"
        return self._see(row, math.nan, Judgement(not present, what))

    def _begin_attempt(self, row: RowFacts) -> None:
        if row.attempt > self._window.attempt:
            self._window.begin_attempt(row.attempt, row.step)
            self.hysteresis.begin_anew()

    def _see(self, row: RowFacts, value: float, found: Judgement) -> Alert | None:
        if not self.hysteresis.see(bad=found.bad, certain=found.certain):
            return None
        state = State.FIRING if self.hysteresis.firing else State.RESOLVED
        return Alert(
            run=row.run,
            rule=self.rule.name,
            state=state,
            severity=self.rule.severity,
            summary=self._summary(value, found) if found.bad else self._resolved_summary(value),
            remedy=self.rule.remedy,
            at_us=row.at_us,
            axis=row.axis,
            step=row.step,
            attempt=row.attempt,
            evidence=self._evidence(found),
            halt=self._halt and found.bad,
            diverged=self.rule.diverged,
        )

    def _subject(self) -> str:
        if self.rule.reading == "longer":
            return f"the longer of {' and '.join(self.rule.keys)}, in times of the other,"
        if self.rule.reading == "ratio":
            return f"{self.rule.keys[0]} as a share of {self.rule.keys[1]}"
        if self.rule.reading == "unequal_groups":
            return "the share of groups with equal rewards"
        return self.rule.keys[0]

    def _summary(self, value: float, found: Judgement) -> str:
        if self.rule.kind == "missing":
            return f"{self.rule.keys[0]} is {found.what}"
        if self.rule.kind == "nonfinite":
            return f"training is {found.what}" if "not finite" in found.what else f"the loss is {found.what}"
        return f"{self._subject()} is {shown(value)}, {found.what}"

    def _resolved_summary(self, value: float) -> str:
        now = "" if math.isnan(value) else f"; {self._subject()} is {shown(value)}"
        return f"over after {self.rule.resolve_rows} good rows{now}"

    def _evidence(self, found: Judgement) -> dict[str, Any]:  # Any: a JSON object
        last = list(self._window.points)[-NUM_SHOWN:]
        evidence: dict[str, Any] = {
            "key": self.rule.keys[0],
            "steps": [point.step for point in last],
            "values": [plain(point.value) for point in last],
            "numbers": {name: plain(number) for name, number in self.rule.numbers.items()},
        }
        if found.usual is not None:
            evidence["usual"] = [None if math.isinf(number) else plain(number) for number in found.usual]
        if found.facts:
            evidence["facts"] = {name: plain(number) for name, number in found.facts.items()}
        if len(self.rule.keys) > 1 and last:
            evidence["newest"] = {key: plain(number) for key, number in last[-1].values.items()}
        return evidence
