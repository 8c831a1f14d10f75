"""Ships records to the metrics service. (First version: the interface; records are counted and go nowhere yet.)"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from furlong import records
from furlong.config import RunConfig
from furlong.jsonline import NO_SECRETS, Secrets
from furlong.rundir import RunDir


@dataclass(frozen=True)
class Stats:
    """What became of the records of this process so far."""

    num_taken: int = 0
    num_acknowledged: int = 0
    num_dropped: int = 0


class Telemetry:
    """Bounded, never blocks, never raises."""

    def __init__(self) -> None:
        self.attempt = 1

    @classmethod
    def for_run(cls, config: RunConfig, run_dir: RunDir, *, service: str, instance: str) -> "Telemetry":
        """The telemetry of one process of a run."""
        return cls()

    @property
    def stats(self) -> Stats:
        return Stats()

    def identify(self, identity: Mapping[str, object], secrets: Secrets = NO_SECRETS) -> None:
        """What every record of this process carries."""

    def ship(self, line: bytes, level: int) -> None:
        """Send a log line that is already encoded."""

    def record(self, obj: Mapping[str, object]) -> None:
        """Send one record."""

    def metrics(
        self,
        axis: str,
        step: int,
        values: Mapping[str, records.Value],
        *,
        part: str,
        parts: Sequence[str],
        rollout_id: int | None = None,
    ) -> None:
        """Send one producer's part of a row."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is acknowledged; whether it was."""
        return True

    def close(self, timeout_s: float) -> bool:
        """Flush and end."""
        return True
