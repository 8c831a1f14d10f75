"""An alert: a rule that began or ceased to fire, with its evidence. Data only."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from furlong.records import encode_number
from furlong.v1 import metrics_pb2


class State(enum.StrEnum):
    """Which of the two happened."""

    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True)
class Alert:
    """One change of one rule in one run."""

    run: str
    rule: str
    state: State
    severity: str
    summary: str
    """What happened, in one sentence with its numbers."""
    remedy: str
    """What to do, in one sentence."""
    at_us: int
    """Microseconds since the epoch, by the metrics service's clock."""
    axis: str = ""
    """Where it was seen. Empty: on no axis."""
    step: int = 0
    attempt: int = 0
    """The run's attempt that it belongs to. 0: not known."""
    evidence: Mapping[str, Any] | None = None  # Any: a JSON object
    halt: bool = False
    """The run is to stop for it."""
    diverged: bool = False
    """Training's numbers are no longer sound."""
    id: int = 0
    """Given by the store, ascending. 0: not stored yet."""

    def to_json(self) -> dict[str, Any]:
        """As targets and HTTP show it."""
        return {
            "id": self.id,
            "run": self.run,
            "rule": self.rule,
            "state": str(self.state),
            "severity": self.severity,
            "axis": self.axis,
            "step": self.step,
            "attempt": self.attempt,
            "summary": self.summary,
            "remedy": self.remedy,
            "evidence": dict(self.evidence or {}),
            "at_us": self.at_us,
            "halt": self.halt,
            "diverged": self.diverged,
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], *, id: int | None = None) -> "Alert":
        """The inverse. Raises KeyError, ValueError for what no alert was."""
        fields = {name: tree[name] for name in cls.__dataclass_fields__ if name in tree}
        fields["state"] = State(fields["state"])
        if id is not None:
            fields["id"] = id
        return cls(**fields)

    def to_proto(self) -> metrics_pb2.Alert:
        """As the wire has it."""
        state = metrics_pb2.Alert.FIRING if self.state is State.FIRING else metrics_pb2.Alert.RESOLVED
        return metrics_pb2.Alert(
            id=self.id,
            run=self.run,
            rule=self.rule,
            state=state,
            severity=self.severity,
            axis=self.axis,
            step=self.step,
            summary=self.summary,
            remedy=self.remedy,
            evidence=orjson.dumps(self.evidence or {}).decode(),
            at_us=self.at_us,
            halt=self.halt,
            attempt=self.attempt,
            diverged=self.diverged,
        )


def shown(number: float) -> str:
    """A number in a sentence."""
    return f"{number + 0.0:.4g}"  # no minus before a zero


def plain(number: float) -> float | int | str:
    """A number in evidence; JSON has no NaN."""
    encoded = encode_number(number)
    return float(f"{encoded:.6g}") if isinstance(encoded, float) else encoded
