"""Reads alerts.jsonl, what fired in a run, as the metrics service writes it. A torn or foreign line is skipped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True)
class Fired:
    """A rule that fired."""

    rule: str
    severity: str
    times: int
    still: bool
    """It fires to this moment."""


def read_fired(path: Path, *, since_us: int = 0) -> list[Fired]:
    """Every rule that fired since a moment, critical ones first. A missing file has none."""
    found: dict[str, Fired] = {}
    for tree in _lines(path):
        if tree["at_us"] < since_us:
            continue
        known = found.get(tree["rule"], Fired(tree["rule"], tree["severity"], 0, False))
        fires = tree["state"] == "firing"
        found[known.rule] = Fired(known.rule, known.severity, known.times + fires, fires)
    fired = [one for one in found.values() if one.times]
    return sorted(fired, key=lambda one: (one.severity != "critical", one.rule))


def _lines(path: Path) -> list[dict[str, Any]]:  # Any: a line of a file
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    trees = []
    for line in lines:
        try:
            tree = orjson.loads(line)
            trees.append(
                {
                    "rule": str(tree["rule"]),
                    "severity": str(tree["severity"]),
                    "state": tree["state"],
                    "at_us": int(tree["at_us"]),
                }
            )
        except (ValueError, KeyError, TypeError):
            continue
    return trees
