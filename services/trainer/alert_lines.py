"""Alerts at the trainer: lines under the rows, and the stop that --halt-on asks for. Pure but for `AlertLines`."""

from collections.abc import Sequence

import orjson
import structlog

from furlong.alertwatch import HeardAlert
from furlong.process import ExitCode, StopSignal
from services.trainer.row_writer import RowWriter

log = structlog.get_logger()

_UNWATCHED_REMEDY = "Start that service with --alert-rules of this run, and without --disable-alerts of these."


class AlertLines:
    """What is done with each alert that is heard. Called from the watch's thread."""

    def __init__(self, rows: RowWriter, stop: StopSignal, *, halt_on: frozenset[str], as_json: bool) -> None:
        self._rows, self._stop = rows, stop
        self._halt_on, self._as_json = halt_on, as_json

    def take(self, alert: HeardAlert) -> None:
        """Show it, and stop the run if it is to stop for it."""
        halts = alert.firing and (alert.halt or alert.rule in self._halt_on)
        self._rows.write(json_line(alert, halts=halts) if self._as_json else text_lines(alert, halts=halts))
        if halts and not self._stop.requested.is_set():
            code = ExitCode.DIVERGED if alert.diverged else ExitCode.HALTED
            log.warning("run_halted", rule=alert.rule, alert=alert.alert_id, summary=alert.summary, exit_code=int(code))
            self._stop.request(f"alert {alert.rule}: {alert.summary}", code=code)

    def take_unwatched(self, address: str, rules: Sequence[str]) -> None:
        """The metrics service does not watch rules of --halt-on: say so now, since nothing will halt the run."""
        named = ", ".join(rules)
        summary = f"the metrics service at {address} does not watch {named}: --halt-on {named} will not stop the run"
        log.warning("halt_rules_not_watched", rules=list(rules), address=address, remedy=_UNWATCHED_REMEDY)
        if self._as_json:
            tree = {"event": "halt_rules_not_watched", "rules": list(rules), "summary": summary}
            self._rows.write(orjson.dumps({**tree, "remedy": _UNWATCHED_REMEDY}).decode())
        else:
            head = "[alert] warning halt_on "
            self._rows.write(f"{head}| {_one_line(summary)}\n{' ' * len(head)}| {_UNWATCHED_REMEDY}")


def text_lines(alert: HeardAlert, *, halts: bool) -> str:
    """For people: what, where, what to do; bars under one another, as in the row."""
    word = alert.severity.upper() if alert.severity == "critical" else alert.severity
    head = f"[alert] {word if alert.firing else 'resolved'} {alert.rule} "
    where = f"{alert.axis} {alert.step}: " if alert.axis else ""
    lines = [f"{where}{alert.summary}"]
    if alert.firing:
        lines.append(alert.remedy)
    if halts:
        lines.append(f"the run stops for it (--halt-on {alert.rule})")
    margin = " " * len(head)
    return "\n".join(f"{margin if index else head}| {_one_line(line)}" for index, line in enumerate(lines))


def json_line(alert: HeardAlert, *, halts: bool) -> str:
    """One JSON object."""
    return orjson.dumps(
        {
            "event": "alert",
            "id": alert.alert_id,
            "run": alert.run,
            "rule": alert.rule,
            "state": "firing" if alert.firing else "resolved",
            "severity": alert.severity,
            "axis": alert.axis or None,
            "step": alert.step if alert.axis else None,
            "attempt": alert.attempt,
            "summary": alert.summary,
            "remedy": alert.remedy,
            "evidence": _tree(alert.evidence),
            "at_us": alert.at_us,
            "halts": halts,
        }
    ).decode()


def _tree(evidence: str) -> object:
    try:
        return orjson.loads(evidence)
    except ValueError:
        return None


def _one_line(text: str) -> str:
    """A user's remedy or a sink's error must not break the shape."""
    return " ".join(text.split())
