"""A rule over several subjects of one run, such as its services: fires while at least one is bad. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from furlong.alertrules import Rule
from services.metrics.alerts.alert import Alert, State

MAX_NAMED = 5


class SubjectWatch:
    """One rule in one run. One more bad subject while it fires is told again; one less is not."""

    def __init__(self, rule: Rule, run: str, *, halt: bool) -> None:
        self.rule, self.run = rule, run
        self.firing = False
        self._halt = halt
        self._told: set[str] = set()

    def see(self, bad: Mapping[str, str], *, at_us: int, attempt: int, now_good: str = "") -> Alert | None:
        """bad: subject -> what is wrong, a sentence without its end. The change that this makes, if any."""
        if not bad:
            if not self.firing:
                return None
            self.firing = False
            self._told.clear()
            return self._alert(State.RESOLVED, now_good or "over", at_us, attempt, {})
        if self.firing and set(bad) <= self._told:
            return None
        self.firing = True
        self._told |= set(bad)
        named = list(bad.values())[:MAX_NAMED]
        more = f"; and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        return self._alert(State.FIRING, "; ".join(named) + more, at_us, attempt, {"subjects": dict(bad)})

    def restore(self, subjects: Iterable[str]) -> None:
        """It fires for these, as the store says."""
        self.firing = True
        self._told |= set(subjects)

    def forget(self) -> None:
        """Nothing fires."""
        self.firing = False
        self._told.clear()

    def _alert(
        self, state: State, summary: str, at_us: int, attempt: int, evidence: dict[str, Any]
    ) -> Alert:  # Any: JSON
        return Alert(
            run=self.run,
            rule=self.rule.name,
            state=state,
            severity=self.rule.severity,
            summary=summary,
            remedy=self.rule.remedy,
            at_us=at_us,
            attempt=attempt,
            evidence={**evidence, "numbers": dict(self.rule.numbers)},
            halt=self._halt and state is State.FIRING,
            diverged=self.rule.diverged,
        )
