"""What an alert rule is. A rule is data: the metrics service watches, others need its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["warning", "critical"]
SEVERITIES = ("warning", "critical")

RowKind = Literal[
    "above",
    "below",
    "outside",
    "changes",
    "missing",
    "nonfinite",
    "spike",
    "climb",
    "collapse",
    "constant",
    "share",
    "fall",
]
"""Kinds that look at the values of rows, one row after another."""
TimeKind = Literal["no_row_for", "phase", "silence", "engine", "sink", "drops", "skew"]
"""Kinds that look at the clock, or at what services say of themselves."""
Reading = Literal["first", "ratio", "longer", "unequal_groups", "if_long"]
"""How one number is read from a row's values; see services/metrics/alerts/reading.py."""


@dataclass(frozen=True)
class Rule:
    """One rule. It fires for one run at a time."""

    name: str
    kind: RowKind | TimeKind
    remedy: str
    """What to do, in one sentence."""
    keys: tuple[str, ...] = ()
    """What it reads, the value itself first. A row that lacks it leaves the rule as it is."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Thresholds by name; each can be set in the rules file."""
    reading: Reading = "first"
    rows: int = 1
    """Fires after so many bad rows in a row."""
    resolve_rows: int = 3
    """Is over after so many good rows in a row."""
    cool_down_rows: int = 0
    """Rows after its end in which it does not fire again."""
    severity: Severity = "warning"
    diverged: bool = False
    """It tells that training's numbers are no longer sound: a halt for it ends with DIVERGED, and saves nothing."""
    axis: str = ""
    """Only rows of this axis. Empty: any that has the key."""
    run: str = "*"
    """Only runs whose name fits this glob."""
    meaning: str = ""
    """What it fires on, for the documentation."""

    @property
    def is_of_rows(self) -> bool:
        """Whether it looks at rows; else at the clock and at services."""
        return self.kind not in ("no_row_for", "phase", "silence", "engine", "sink", "drops", "skew")
