"""Keeps reports on disk until they are surely with the metrics service or in the spool, so that the next start of a
killed service sends them.

What cannot be written or read costs only itself: reporting never waits for this and never fails for it.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import structlog

from furlong.records import Value, decode_value, encode_values

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class Report:
    """This service's part of one row."""

    axis: str
    step: int
    values: Mapping[str, Value]
    parts: tuple[str, ...]
    attempt: int
    is_answered: bool = False
    """The hook has decided: these values are what is sent."""

    @property
    def place(self) -> tuple[str, int, int]:
        """Which row, of which attempt."""
        return (self.axis, self.step, self.attempt)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.axis} {self.step}"


class UnfinishedReports:
    """One file a report, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, report: Report) -> None:
        """Keep it; in place of what was kept of the same row."""
        tree = {
            "axis": report.axis,
            "step": report.step,
            "attempt": report.attempt,
            "parts": report.parts,
            "is_answered": report.is_answered,
            "values": encode_values(report.values),
        }
        path = self._path(report)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(".tmp")
            scratch.write_bytes(orjson.dumps(tree))  # not synced: it is to outlive the process, not the machine
            scratch.replace(path)
        except (OSError, TypeError, ValueError) as error:
            log.warning("report_not_kept", report=report.name, error=repr(error))

    def forget(self, report: Report) -> None:
        """It was sent."""
        with contextlib.suppress(OSError):  # then it is sent again, and counts once
            self._path(report).unlink(missing_ok=True)

    def left_over(self) -> list[Report]:
        """What an earlier start did not get to send, in the order of steps."""
        found = []
        for path in self._folder.glob("*.json"):
            try:
                tree = orjson.loads(path.read_bytes())
                values = {str(name): decode_value(value) for name, value in tree["values"].items()}
                place = (str(tree["axis"]), int(tree["step"]))
                parts, answered = tuple(map(str, tree["parts"])), tree["is_answered"] is True
                found.append(Report(*place, values, parts, int(tree["attempt"]), answered))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("report_not_readable", path=str(path), error=repr(error))
        return sorted(found, key=lambda report: (report.axis, report.step, report.attempt))

    def _path(self, report: Report) -> Path:
        return self._folder / f"{report.axis.replace('/', '-')}-{report.step}-{report.attempt}.json"
