"""What a sender is told of its metrics records that are taken, but make no row or only a part of theirs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

MAX_TOLD = 100
"""Of a batch; the count goes on."""
MAX_NAMES_TOLD = 3


@dataclass
class Noticed:
    """Of one batch."""

    first_sequence: int
    num: int = 0
    told: list[tuple[int, str]] = field(default_factory=list)
    """Which of the batch, and why."""

    def add(self, sequences: Sequence[int], records: Sequence[object], record: object, reason: str) -> None:
        """Count one of the records; which it is, is looked up only for those that are told."""
        self.num += 1
        if len(self.told) < MAX_TOLD:
            at = next(index for index, other in enumerate(records) if other is record)
            self.told.append((sequences[at] - self.first_sequence, reason))


def left_out(problems: Mapping[str, str]) -> str:
    """Names of values that are no values, and why, in one sentence."""
    told = [f"{name} {problem}" for name, problem in islice(problems.items(), MAX_NAMES_TOLD)]
    more = f" and {len(problems) - len(told)} more" if len(problems) > len(told) else ""
    return f"values left out: {'; '.join(told)}{more}"
