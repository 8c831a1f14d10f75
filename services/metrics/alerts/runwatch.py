"""All rules over the rows of one run: what a row changes, and what a new attempt begins anew."""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from furlong.alertrules import Rule
from furlong.records import decode_number
from services.metrics.alerts.alert import Alert
from services.metrics.alerts.rowwatch import RowFacts, RowWatch

TRAINING_AXES = ("train/step", "rollout/step", "eval/step")


class RunWatch:
    """One run's rules of rows, and when the keys that must keep coming last came."""

    def __init__(self, rules: Iterable[Rule], *, halt_on: frozenset[str]) -> None:
        every = list(rules)
        self._watches = [RowWatch(rule, halt=rule.name in halt_on) for rule in every if rule.is_of_rows]
        self._by_key: dict[str, list[RowWatch]] = {}
        self._always = [watch for watch in self._watches if watch.rule.kind == "missing"]
        for watch in self._watches:
            for key in watch.rule.keys if watch.rule.kind != "missing" else ():
                self._by_key.setdefault(key, []).append(watch)
        self._timed = [rule for rule in every if rule.kind == "no_row_for"]
        self._seen_s: dict[str, float] = {}
        """Rule -> when its key was last there, on the monotonic clock."""
        self.attempt = 0

    def take(self, row: RowFacts, *, now_s: float = 0.0) -> list[Alert]:
        """The changes that a row makes, at most one a rule."""
        if row.attempt < self.attempt and row.axis in TRAINING_AXES:
            return []  # an earlier attempt's late words; who reports on another axis may know of no attempts
        self.attempt = max(self.attempt, row.attempt)
        for rule in self._timed:
            if rule.keys[0] in row.values and rule.axis in ("", row.axis):
                self._seen_s[rule.name] = now_s
        concerned = {watch.rule.name: watch for key in row.values for watch in self._by_key.get(key, ())}
        changes = [watch.take(row) for watch in (*concerned.values(), *self._always)]
        return [change for change in changes if change is not None]

    def late(self, rule: Rule, now_s: float) -> dict[str, str]:
        """Whether a key that was there has not come for too long, as a sentence by key."""
        seen_s = self._seen_s.get(rule.name)
        if seen_s is None or now_s - seen_s <= rule.numbers["seconds"]:
            return {}
        return {rule.keys[0]: f"no row with {rule.keys[0]} for {now_s - seen_s:.0f} s"}

    def shift(self, seconds: float) -> None:
        """We did not listen for a while."""
        self._seen_s = {name: seen_s + seconds for name, seen_s in self._seen_s.items()}

    def set_firing(self, names: Iterable[str]) -> None:
        """After a restart: what fires is what the store says, whatever the rebuilt windows would make of it."""
        firing = set(names)
        for watch in self._watches:
            watch.hysteresis.firing = watch.rule.name in firing

    def begin_attempt(self, attempt: int) -> None:
        """A newer attempt: nothing fires any more; what its rows say counts."""
        self.attempt = attempt
        for watch in self._watches:
            watch.hysteresis.begin_anew()


def fits(rule: Rule, run: str) -> bool:
    """Whether a rule is for a run."""
    return fnmatch.fnmatchcase(run, rule.run)


def facts_of(run: str, body: Mapping[str, Any], at_us: int) -> RowFacts:  # Any: a row's JSON
    """A row's JSON as rules see it. A value that is no number is left out."""
    values = {}
    for name, value in body["values"].items():
        try:
            values[name] = float(decode_number(value))
        except ValueError:
            continue
    return RowFacts(run, str(body["axis"]), int(body["step"]), int(body.get("attempt", 1)), values, at_us)
