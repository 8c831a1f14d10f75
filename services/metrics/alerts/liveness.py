"""What the services of one run say of themselves: heartbeats, drops, clocks, phases, engines. Pure; time is given.

Every time here is on one monotonic clock in seconds, unless it is a record's own.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from furlong.alertrules import Rule

Record = Mapping[str, Any]  # Any: a record's JSON
MAX_PHASES = 50
MAX_SERVICES = 4_096
"""Of one run; more are not watched."""
DEFAULT_EVERY_S = 10.0


@dataclass
class _Phase:
    open_since: float | None = None
    known_stalled: bool = False
    """It was told before this process began, and nothing was heard of it since."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    """What it took, the last times."""


@dataclass
class _Service:
    last_seen: float
    known_silent: bool = False
    """It was told before this process began, and nothing was heard since."""
    known_skew: str = ""
    every_s: float = DEFAULT_EVERY_S
    num_dropped: float | None = None
    """In all since it started, by its last heartbeat."""
    dropped_at: float | None = None
    dropped: float = 0.0
    skews: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    skew_at: float = -1e9
    phases: dict[str, _Phase] = field(default_factory=dict)


class Liveness:
    """The services of one run, by instance."""

    def __init__(self) -> None:
        self._services: dict[str, _Service] = {}
        self._engines_gone: dict[str, str] = {}
        self.ended = False
        """The run is over: nobody need be there."""

    # -- what comes in

    def take(self, record: Record, *, now: float, wall_s: float) -> None:
        """Take a notable record. A record that makes no sense changes nothing."""
        event, instance = record.get("event"), record.get("instance")
        if not isinstance(instance, str) or not instance or self.ended:
            return
        if instance not in self._services and len(self._services) + len(self._engines_gone) >= MAX_SERVICES:
            return
        if event == "heartbeat" and record.get("closing"):
            self._services.pop(instance, None)
            return
        if event in ("heartbeat", "phase", "run_started", "service_ready"):
            service = self._service(instance, now)
            if event == "heartbeat":
                _take_heartbeat(service, record, now, wall_s)
            elif event == "phase":
                _take_phase(service, record, now)
        elif event in ("telemetry_dropped", "rows_dropped"):
            total = sum(_number(record.get(key)) for key in ("num_logs", "num_warnings", "num_metrics", "num_rows"))
            service = self._service(instance, now)
            service.dropped_at, service.dropped = now, max(1.0, total)
        elif event == "engine_gone":
            self._engines_gone[str(record.get("engine"))] = str(record.get("exit_status", "?"))
        elif event == "engine_ready":
            self._engines_gone.pop(str(record.get("engine")), None)

    def _service(self, instance: str, now: float) -> _Service:
        service = self._services.setdefault(instance, _Service(now))
        service.last_seen, service.known_silent = now, False
        return service

    def run_ended(self) -> None:
        """The run is over: nothing is missed any more, until it is started again."""
        self._services.clear()
        self._engines_gone.clear()
        self.ended = True

    def run_started(self) -> None:
        """A new attempt: those that are there say so again."""
        self._services.clear()
        self._engines_gone.clear()
        self.ended = False

    def shift(self, seconds: float) -> None:
        """We did not listen for a while: nobody is to blame for that."""
        for service in self._services.values():
            service.last_seen += seconds
            for phase in service.phases.values():
                if phase.open_since is not None:
                    phase.open_since += seconds

    # -- what is bad now: subject -> a sentence

    def silent(self, rule: Rule, now: float) -> dict[str, str]:
        return {
            name: f"{name} has sent nothing for {now - service.last_seen:.0f} s, and said no goodbye"
            for name, service in self._services.items()
            if service.known_silent
            or now - service.last_seen > max(rule.numbers["min_s"], rule.numbers["times"] * service.every_s)
        }

    def engines_gone(self) -> dict[str, str]:
        return {name: f"{name} ended with status {status}" for name, status in self._engines_gone.items()}

    def stalled(self, rule: Rule, now: float) -> dict[str, str]:
        """Phases that are open for too long. A service that is silent is another rule's."""
        bad = {}
        for instance, service in self._services.items():
            for name, phase in service.phases.items():
                if phase.open_since is None or len(phase.seconds) < rule.numbers["min_closed"]:
                    continue  # it has no usual time yet
                median = statistics.median(phase.seconds)
                open_s = now - phase.open_since
                if phase.known_stalled or open_s > max(rule.numbers["min_s"], rule.numbers["times"] * median):
                    words = f"{instance} is in {name} for {open_s:.0f} s; its median is {median:.3g} s"
                    bad[f"{instance} {name}"] = words
        return bad

    def dropping(self, rule: Rule, now: float) -> dict[str, str]:
        return {
            name: f"{name} dropped {service.dropped:.0f} records for want of room"
            for name, service in self._services.items()
            if service.dropped_at is not None and now - service.dropped_at < rule.numbers["seconds"]
        }

    def skewed(self, rule: Rule) -> dict[str, str]:
        bad, count = {}, int(rule.numbers["beats"])
        for name, service in self._services.items():
            last = list(service.skews)[-count:]
            if service.known_skew and len(last) < count:
                bad[name] = service.known_skew
                continue
            if len(last) == count and min(map(abs, last)) > rule.numbers["seconds"] and len({s > 0 for s in last}) == 1:
                middle = statistics.median(last)
                bad[name] = f"the clock of {name} is {abs(middle):.0f} s {'ahead' if middle > 0 else 'behind'}"
        return bad

    # -- over a restart of the metrics service

    def is_empty(self) -> bool:
        """Nothing to remember."""
        return not self._services and not self._engines_gone

    def dump(self) -> dict[str, Any]:  # Any: JSON
        """What must not be forgotten: who is there and busy with what, and which engines are gone."""
        alive = {name: {"every_s": one.every_s, "phases": _dump_phases(one)} for name, one in self._services.items()}
        return {"alive": alive, "engines_gone": dict(self._engines_gone), "ended": self.ended}

    def load(self, tree: Mapping[str, Any], now: float) -> None:
        """The inverse. Everybody gets the time that a fresh heartbeat has."""
        for name, known in dict(tree.get("alive", {})).items():
            service = self._services[str(name)] = _Service(
                now, every_s=_number(known.get("every_s")) or DEFAULT_EVERY_S
            )
            for phase, (is_open, seconds) in dict(known.get("phases", {})).items():
                service.phases[phase] = _Phase(now if is_open else None)
                service.phases[phase].seconds.extend(map(float, seconds))
        self._engines_gone = {str(name): str(why) for name, why in dict(tree.get("engines_gone", {})).items()}
        self.ended = bool(tree.get("ended", False))

    def resume(self, rule: Rule, subjects: Mapping[str, str], now: float) -> None:
        """After `load`: this was told as bad, and is so until something else is heard."""
        for subject, words in subjects.items():
            service = self._services.get(subject.partition(" ")[0])
            if service is None:
                continue
            if rule.kind == "silence":
                service.known_silent = True
            elif rule.kind == "phase" and (phase := service.phases.get(subject.partition(" ")[2])) is not None:
                phase.known_stalled = True
            elif rule.kind == "drops":
                service.dropped_at = now
            elif rule.kind == "skew":
                service.known_skew = words


def _dump_phases(service: _Service) -> dict[str, tuple[bool, list[float]]]:
    return {name: (phase.open_since is not None, list(phase.seconds)) for name, phase in service.phases.items()}


def _take_heartbeat(service: _Service, record: Record, now: float, wall_s: float) -> None:
    service.every_s = _number(record.get("every_s")) or DEFAULT_EVERY_S
    counts = record.get("num_dropped")
    total = sum(_number(count) for count in counts.values()) if isinstance(counts, dict) else _number(counts)
    if service.num_dropped is not None and total > service.num_dropped:
        service.dropped_at, service.dropped = now, total - service.num_dropped
    service.num_dropped = total
    if now - service.skew_at > service.every_s / 2:  # several at once waited somewhere: they tell nothing of clocks
        sent = _seconds(record.get("ts"))
        if sent is not None:
            service.skews.append(sent - wall_s)
    service.skew_at = now


def _take_phase(service: _Service, record: Record, now: float) -> None:
    name = str(record.get("phase"))[:100]
    if name not in service.phases and len(service.phases) >= MAX_PHASES:
        return
    phase = service.phases.setdefault(name, _Phase())
    phase.known_stalled = False
    if record.get("state") == "open":
        phase.open_since = now
        return
    phase.open_since = None
    seconds = record.get("seconds")
    if isinstance(seconds, (int, float)) and seconds >= 0:
        phase.seconds.append(float(seconds))


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def _seconds(ts: object) -> float | None:
    try:
        return datetime.fromisoformat(str(ts).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
