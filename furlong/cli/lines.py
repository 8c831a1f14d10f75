"""Log lines, rows and alerts as one line each for people. Pure; what others wrote cannot move the cursor."""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from furlong.asking.levels import CRITICAL, DEBUG, ERROR, INFO, NAMES, WARNING, level_number

Fields = Mapping[str, Any]  # Any: JSON
MAX_VALUE_CHARS = 200
MAX_TEXT_CHARS = 2000
MAX_ROW_VALUES = 6
MAX_ROW_OBJECTS = 3
"""Histograms, and tables, that are named."""
TIME_KEYS = ("ts", "timestamp", "@timestamp", "time", "date")
TEXT_KEYS = ("text", "message", "msg", "log")
_IDENTITY = ("level", "severity", "event", "run", "service", "instance", "rank", *TIME_KEYS, *TEXT_KEYS)
_FIRST = ("rollout/raw_reward", "train/loss", "perf/step_time", "train/grad_norm", "train/entropy_loss", "train/lr")
_COLOURS = {DEBUG: "2", INFO: "32", WARNING: "33", ERROR: "31", CRITICAL: "1;31"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Style:
    """Colours, or none."""

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours

    def __call__(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colours else text


def log_line(record: Fields, received: str, style: Style, *, with_run: bool = False) -> str:
    """`17:03:41.123 warning trainer-0 weights_published policy_version=13 seconds=2.1`"""
    level = level_number(record.get("level", record.get("severity")))
    who = str(record.get("instance") or record.get("service") or "-")
    if with_run:
        who = f"{record.get('run', '-')}/{who}"
    texts = [record[key] for key in TEXT_KEYS if isinstance(record.get(key), str) and record[key]]
    event = record.get("event")
    head = [] if event is None or (event == "line" and texts) else [style(clean(str(event)), "1")]
    said = [clean(text.strip(), MAX_TEXT_CHARS) for text in texts]
    rest = [f"{clean(key)}={_value(value)}" for key, value in record.items() if key not in _IDENTITY]
    parts = [
        style(clock_of(moment(record, received)), "2"),
        style(NAMES[level].ljust(8), _COLOURS[level]),
        style(clean(who).ljust(24 if with_run else 10), "36"),
        *head,
        *said,
        *([style(" ".join(rest), "2")] if rest else []),
    ]
    return " ".join(parts)


def row_line(row: Fields, style: Style, *, with_run: bool = False) -> str:
    """`17:03:44.012 row      rollout/step 12 rollout/raw_reward=0.52 perf/step_time=3.1 and 38 more`"""
    values: Fields = row.get("values", {})
    names = [name for name in _FIRST if name in values]
    names += sorted(name for name in values if name not in names)
    shown = [f"{clean(name)}={number(values[name])}" for name in names[:MAX_ROW_VALUES]]
    more = len(names) - len(shown)
    where = f"{row.get('axis')} {row.get('step')}"
    marks = [] if row.get("complete", True) else ["incomplete"]
    marks += ["amended"] if row.get("amends") else []
    marks += [f"attempt {row['attempt']}"] if row.get("attempt", 1) != 1 else []
    parts = [
        style(clock_of(moment({}, str(row.get("emitted", "")))), "2"),
        style("row".ljust(8), "34"),
        style(clean(f"{row.get('run', '-')}/{where}").ljust(24) if with_run else clean(where).ljust(10), "36"),
        *([f"({', '.join(marks)})"] if marks else []),
        *shown,
        *([f"and {more} more"] if more > 0 else []),
        *(f"{what}: {_names(row[what])}" for what in ("histograms", "tables") if row.get(what)),
    ]
    return " ".join(parts)


def _names(objects: Fields) -> str:
    names = [clean(name) for name in sorted(objects)]
    more = f" and {len(names) - MAX_ROW_OBJECTS} more" if len(names) > MAX_ROW_OBJECTS else ""
    return ", ".join(names[:MAX_ROW_OBJECTS]) + more


def alert_line(alert: Fields, style: Style, *, with_run: bool = False) -> str:
    """`17:03:44.012 FIRING   loss_spike: train/step 40: train/loss is 9.1. Lower --lr.`"""
    firing = alert.get("state") == "firing"
    run = f"{clean(str(alert.get('run', '-')))}: " if with_run else ""
    summary, remedy = clean(str(alert.get("summary", "")), 1000), clean(str(alert.get("remedy", "")), 1000)
    summary += "." if firing and remedy and not summary.endswith(".") else ""
    where = f"{clean(str(alert['axis']))} {alert.get('step', '-')}: " if alert.get("axis") else ""
    code = "1;31" if firing and alert.get("severity") == "critical" else "33" if firing else "32"
    parts = [
        style(clock_of(float(alert.get("at_us", 0)) / 1e6), "2"),
        style(str(alert.get("state", "-")).upper().ljust(8), code),
        f"{run}{style(clean(str(alert.get('rule', '-'))), '1')}: {where}{summary}",
        *([remedy] if firing and remedy else []),
    ]
    return " ".join(parts)


def moment(record: Fields, received: str) -> float:
    """When a record was written, in seconds since the epoch; when it came, if it does not say."""
    for key in TIME_KEYS:
        when = _seconds(record.get(key))
        if when is not None:
            return when
    return _seconds(received) or 0.0


def clock_of(seconds: float) -> str:
    """The local time of day."""
    try:
        when = datetime.fromtimestamp(seconds, UTC).astimezone()
    except (ValueError, OverflowError, OSError):
        return "--:--:--.---"
    return f"{when:%H:%M:%S}.{when.microsecond // 1000:03d}"


def clean(text: str, max_chars: int = MAX_VALUE_CHARS) -> str:
    """The text on one line, of bounded length, without anything that a terminal would obey."""
    if len(text) > max_chars:
        text = f"{text[:max_chars]}...[{len(text) - max_chars} more]"
    return _CONTROL.sub(lambda found: {"\n": "\\n", "\t": " ", "\r": ""}.get(found[0], f"\\x{ord(found[0]):02x}"), text)


def number(value: object) -> str:
    """A value of a row: a whole number whole, another in four digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return clean(str(value))
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) <= 2**53):
        return str(int(value))
    return f"{value:.4g}"


def _value(value: object) -> str:
    if isinstance(value, str):
        text = value.rstrip()
        if "\n" in text:  # a traceback: its last line says what happened
            text = text.splitlines()[-1]
        return repr(clean(text)) if " " in text or not text else clean(text)
    if isinstance(value, float):
        return number(value)
    return clean(str(value))


def _seconds(when: object) -> float | None:
    """Of ISO 8601, or of seconds, milliseconds, microseconds or nanoseconds since the epoch."""
    if isinstance(when, str) and when:
        try:
            parsed = datetime.fromisoformat(when)
        except ValueError:
            return None
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    if isinstance(when, bool) or not isinstance(when, (int, float)) or not 1e8 < when < 1e20:
        return None
    for scale in (1e9, 1e6, 1e3):
        if when > 1e8 * scale:
            return when / scale
    return float(when)
