"""What the service counts since its start. One thread changes a count, mostly the writer's; anyone reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

log = structlog.get_logger()

MAX_WARNINGS = 100
"""Of a kind; the counts go on."""


@dataclass
class Counts:
    """Since the start."""

    num_refused: int = 0
    num_missing: int = 0
    """Numbers that a producer skipped: records it lost."""
    num_dropped: int = 0
    """Records that a producer dropped for want of room, and said so."""
    num_bad_metrics: int = 0
    """Metrics records that have no place in any row."""
    num_values_skipped: int = 0
    """Values in metrics records that are no numbers."""
    num_conflicts: int = 0
    num_skewed: int = 0
    """Records whose time is no time, or far from ours."""
    num_without_ts: int = 0
    """Records that do not say when they were written, which they need not."""
    num_held: int = 0
    """Batches that were not taken since the disk is full; they come again."""
    num_removed: int = 0
    """Records that retention removed."""
    num_engine_values_left_out: int = 0
    """Numbers of engines, of their lines or endpoints, beyond the bounds. Changed by the tailer's thread."""
    _warned: set[str] = field(default_factory=set, repr=False)

    def shown(self) -> dict[str, int]:
        """The counts by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def conflict(self, row: str, problem: str) -> None:
        """Parts of a row that do not fit each other."""
        self.num_conflicts += 1
        if self.num_conflicts <= MAX_WARNINGS:
            log.warning("metrics_conflict", row=row, problem=problem)

    def bad_metrics(self, producer: str, problem: str) -> None:
        """A metrics record without a place."""
        self.num_bad_metrics += 1
        if self.num_bad_metrics <= MAX_WARNINGS:
            log.warning("metrics_record_fits_no_row", producer=producer, problem=problem)

    def values_skipped(self, producer: str, problems: Mapping[str, str]) -> None:
        """Values that are no numbers; one warning a name."""
        self.num_values_skipped += len(problems)
        for name, problem in problems.items():
            if name not in self._warned and len(self._warned) < MAX_WARNINGS:
                self._warned.add(name)
                log.warning("metrics_value_skipped", producer=producer, name=name, problem=problem)
