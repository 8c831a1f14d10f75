"""The targets that are in the process or beside it: the service's log, and a file of the run directory."""

import asyncio
import os
import threading
from pathlib import Path

import orjson
import structlog

from services.metrics.alerts.alert import Alert, State

log = structlog.get_logger()
TAIL_BYTES = 64 * 1024


class LogTarget:
    """A line of the metrics service's own log."""

    name = "log"
    timeout_s = 5.0

    async def send(self, alert: Alert) -> None:
        """Critical ones are errors."""
        firing = alert.state is State.FIRING
        say = log.info if not firing else (log.error if alert.severity == "critical" else log.warning)
        say(
            "alert_firing" if firing else "alert_resolved",
            alert=alert.id,
            rule=alert.rule,
            severity=alert.severity,
            alert_run=alert.run,
            axis=alert.axis,
            step=alert.step,
            summary=alert.summary,
            remedy=alert.remedy,
        )


class FileTarget:
    """alerts.jsonl: one line an alert. Each is there once: the file itself tells which is the last."""

    name = "file"
    timeout_s = 10.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: int | None = None
        self._appending = threading.Lock()
        """On a disk that hangs, a try that was given up may still be at work."""

    async def send(self, alert: Alert) -> None:
        await asyncio.to_thread(self._append, alert)

    def _append(self, alert: Alert) -> None:
        with self._appending:
            self._append_once(alert)

    def _append_once(self, alert: Alert) -> None:
        last = last_id(self._path) if self._last is None else self._last
        if alert.id <= last:
            return  # written before a kill, and not noted
        self._last = None  # should this fail it may leave half a line, which must be ended first
        line = orjson.dumps(alert.to_json()) + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            written = os.write(descriptor, line)
            if written != len(line):
                raise OSError(f"{self._path}: {written} of {len(line)} bytes were written")
        finally:
            os.close(descriptor)
        self._last = alert.id


def last_id(path: Path) -> int:
    """The id of the last whole line; 0 when there is none. Ends a torn line, so that the next begins anew."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
            if tail and not tail.endswith(b"\n"):
                file.write(b"\n")
    except FileNotFoundError:
        return 0
    for line in reversed(tail.splitlines()):
        try:
            return int(orjson.loads(line)["id"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
