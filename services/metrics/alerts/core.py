"""All rules over all runs. Pure: rows, records and the time go in, alerts without an id come out."""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.alertrules import Rule
from furlong.alertrules.choice import Chosen
from services.metrics.alerts.alert import Alert, State
from services.metrics.alerts.liveness import Liveness, Record
from services.metrics.alerts.rowwatch import RowFacts
from services.metrics.alerts.runwatch import RunWatch, fits
from services.metrics.alerts.subjects import SubjectWatch

PAUSE_S = 5.0
"""A longer time between two ticks means that this process stood still."""


MAX_IDLE_RUNS = 256
MAX_RUNS = 512
"""Runs that are watched; of more, those that were heard of longest ago are let go."""


@dataclass(frozen=True)
class SinkFacts:
    """How a sink is."""

    name: str
    state: str
    num_rows_behind: int
    last_error: str


@dataclass(frozen=True)
class Now:
    """The time, on both clocks."""

    monotonic_s: float
    wall_s: float

    @property
    def us(self) -> int:
        return int(self.wall_s * 1e6)


class _Run:
    """One run's rules and services."""

    def __init__(self, name: str, chosen: Chosen) -> None:
        self.rules = [rule for rule in chosen.rules.values() if fits(rule, name)]
        self.rows = RunWatch(self.rules, halt_on=chosen.halt_on)
        self.services = Liveness()
        self.heard_s = 0.0
        """When anything came of it."""
        self.watches = {
            rule.name: SubjectWatch(rule, name, halt=rule.name in chosen.halt_on)
            for rule in self.rules
            if not rule.is_of_rows
        }


class AlertCore:
    """Not thread-safe."""

    def __init__(self, chosen: Chosen, *, own_run: str) -> None:
        """own_run: whose alerts those of the service itself are, such as a sink's."""
        self._chosen, self._own_run = chosen, own_run
        self._runs: dict[str, _Run] = {}
        self._firing: dict[tuple[str, str], Alert] = {}
        self._sinks_bad_since: dict[str, float] = {}
        self._last_tick_s: float | None = None

    def firing(self) -> list[Alert]:
        """What fires now, oldest first."""
        return sorted(self._firing.values(), key=lambda alert: (alert.at_us, alert.rule))

    # -- rows

    def warm_up(self, run: str, rows: Iterable[RowFacts]) -> None:
        """Build a run's windows anew from rows that were judged before."""
        known = self._run(run)
        watch = RunWatch(known.rules, halt_on=self._chosen.halt_on)
        for row in rows:
            watch.take(row)
        watch.attempt = max(watch.attempt, known.rows.attempt)
        known.rows = watch
        watch.set_firing(rule for name, rule in self._firing if name == run)

    def take_row(self, row: RowFacts, now: Now) -> list[Alert]:
        """Judge a row."""
        run = self._run(row.run)
        run.heard_s = now.monotonic_s
        changes = []
        if row.attempt > run.rows.attempt:
            if run.rows.attempt:
                changes += self._begin_attempt(row.run, row.attempt, row.at_us)
            run.rows.attempt = row.attempt
        for alert in run.rows.take(row, now_s=now.monotonic_s):
            changes.append(dataclasses.replace(alert, attempt=run.rows.attempt))
        return self._keep(changes)

    def let_go(self, name: str) -> None:
        """Give up a run's windows, for want of room; `warm_up` brings them back."""
        run = self._run(name)
        attempt = run.rows.attempt
        run.rows = RunWatch(run.rules, halt_on=self._chosen.halt_on)
        run.rows.attempt = attempt

    def trim(self, keep: Container[str]) -> None:
        """Forget runs that have no windows, no services and nothing that fires."""
        if len(self._runs) <= MAX_IDLE_RUNS:
            return
        firing = {run for run, _ in self._firing}
        for name, run in list(self._runs.items()):
            if name not in keep and name not in firing and name != self._own_run and run.services.is_empty():
                del self._runs[name]

    # -- records

    def take_record(self, name: str, record: Record, now: Now) -> list[Alert]:
        """Take a notable record: heartbeats, phases, drops, engines, and a run's start and end."""
        if name not in self._runs and len(self._runs) >= 2 * MAX_RUNS:
            return []  # until the next tick has made room
        run = self._run(name)
        run.heard_s = now.monotonic_s
        event = record.get("event")
        if event == "run_started":
            attempt = record.get("attempt")
            run.services.run_started()
            run.services.take(record, now=now.monotonic_s, wall_s=now.wall_s)
            if isinstance(attempt, int) and attempt > run.rows.attempt:
                changes = self._begin_attempt(name, attempt, now.us)
                return self._keep(changes)
            return []
        if event == "run_ended":
            run.services.run_ended()
            return self._keep(self._services_of(name, run, now))
        run.services.take(record, now=now.monotonic_s, wall_s=now.wall_s)
        return []

    def _begin_attempt(self, name: str, attempt: int, at_us: int) -> list[Alert]:
        """What fired in an earlier attempt is over; the new one is judged afresh."""
        run = self._runs[name]
        run.rows.begin_attempt(attempt)
        for watch in run.watches.values():
            watch.forget()
        return self._over(name, f"over: attempt {attempt} of the run began", at_us)

    def _over(self, name: str, summary: str, at_us: int) -> list[Alert]:
        """The end of all that fires of a run."""
        over = [alert for (owner, _), alert in self._firing.items() if owner == name]
        return [
            dataclasses.replace(
                alert, state=State.RESOLVED, summary=summary, at_us=at_us, id=0, halt=False, evidence={}
            )
            for alert in over
        ]

    # -- time

    def tick(self, now: Now, *, sinks: Sequence[SinkFacts], paused: bool) -> list[Alert]:
        """Look at the clock. paused: records could not be taken in, so that silence says nothing."""
        last = self._last_tick_s
        self._last_tick_s = now.monotonic_s
        gap_s = now.monotonic_s - last if last is not None else 0.0
        if paused or gap_s > PAUSE_S:
            for run in self._runs.values():
                run.services.shift(gap_s)
                run.rows.shift(gap_s)
        changes = self._make_room(now)
        for name, run in self._runs.items():
            changes += self._services_of(name, run, now)
        changes += self._sinks(sinks, now)
        return self._keep(changes)

    def _make_room(self, now: Now) -> list[Alert]:
        """Let go of the runs that are too many; what fired of them is over, as nobody looks any more."""
        others = [name for name in self._runs if name != self._own_run]
        excess = len(others) - MAX_RUNS
        if excess <= 0:
            return []
        changes: list[Alert] = []
        for name in sorted(others, key=lambda name: self._runs[name].heard_s)[:excess]:
            changes += self._over(name, f"over: more than {MAX_RUNS} runs are watched", now.us)
            del self._runs[name]
        return changes

    def _services_of(self, name: str, run: _Run, now: Now) -> list[Alert]:
        found = []
        for watch in run.watches.values():
            bad = self._bad(watch.rule, run, now)
            if bad is not None:
                found.append(watch.see(bad, at_us=now.us, attempt=run.rows.attempt))
        return [alert for alert in found if alert is not None]

    def _bad(self, rule: Rule, run: _Run, now: Now) -> dict[str, str] | None:
        """What is bad by a rule; None: it is not of a run's services."""
        services, now_s = run.services, now.monotonic_s
        if rule.kind == "silence":
            return services.silent(rule, now_s)
        if rule.kind == "phase":
            return services.stalled(rule, now_s)
        if rule.kind == "engine":
            return services.engines_gone()
        if rule.kind == "drops":
            return services.dropping(rule, now_s)
        if rule.kind == "skew":
            return services.skewed(rule)
        if rule.kind == "no_row_for":
            return {} if services.ended else run.rows.late(rule, now_s)
        return None

    def _sinks(self, sinks: Sequence[SinkFacts], now: Now) -> list[Alert]:
        run = self._run(self._own_run)
        watch = next((watch for watch in run.watches.values() if watch.rule.kind == "sink"), None)
        if watch is None:
            return []
        unwell = {sink.name: sink for sink in sinks if sink.state in ("failing", "lagging")}
        self._sinks_bad_since = {name: self._sinks_bad_since.get(name, now.monotonic_s) for name in unwell}
        bad = {}
        for name, sink in unwell.items():
            seconds = now.monotonic_s - self._sinks_bad_since[name]
            if seconds >= watch.rule.numbers["seconds"]:
                why = f" ({sink.last_error[:200]})" if sink.last_error else ""
                bad[name] = f"sink {name} is {sink.state}, {sink.num_rows_behind} rows behind{why}"
        alert = watch.see(bad, at_us=now.us, attempt=run.rows.attempt, now_good="all sinks are up to date again")
        return [] if alert is None else [alert]

    # -- over a restart

    def restore(self, firing: Iterable[Alert], services: Mapping[str, Any], now: Now) -> None:
        """What the store says: the alerts that fire, and who was there."""
        for name, tree in services.items():
            self._run(name).services.load(tree, now.monotonic_s)
        for alert in firing:
            if alert.rule not in self._chosen.rules:
                continue  # a rule that is no longer watched: the engine ends it
            self._firing[alert.run, alert.rule] = alert
            run = self._run(alert.run)
            run.rows.attempt = max(run.rows.attempt, alert.attempt)
            if alert.rule in run.watches:
                subjects = (alert.evidence or {}).get("subjects", {})
                watch = run.watches[alert.rule]
                watch.restore(subjects)
                run.services.resume(watch.rule, subjects, now.monotonic_s)
                if watch.rule.kind == "sink":
                    since = now.monotonic_s - watch.rule.numbers["seconds"]
                    self._sinks_bad_since.update(dict.fromkeys(subjects, since))

    def services(self) -> dict[str, Any]:
        """What must not be forgotten of the runs' services."""
        return {name: run.services.dump() for name, run in self._runs.items() if not run.services.is_empty()}

    def _run(self, name: str) -> _Run:
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = _Run(name, self._chosen)
        return run

    def _keep(self, changes: Iterable[Alert]) -> list[Alert]:
        kept = list(changes)
        for alert in kept:
            if alert.state is State.FIRING:
                self._firing[alert.run, alert.rule] = alert
            else:
                self._firing.pop((alert.run, alert.rule), None)
        return kept
