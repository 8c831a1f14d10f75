"""Where the loop is, for whoever asks: written by the loop, read by the gRPC servicer on other threads."""

import contextlib
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, replace

from furlong.phases import PhaseReport


@dataclass(frozen=True)
class Snapshot:
    """The loop at one moment."""

    rollout_id: int | None = None
    policy_version: int = 0
    train_step: int = 0
    phase: str = "starting"
    phase_since: float = 0.0
    """On the monotonic clock."""
    checkpoint_rollout_id: int | None = None


class Status:
    """The current snapshot, and how long each stage of the iteration took."""

    def __init__(self, report: PhaseReport | None = None) -> None:
        """report: told of each stage."""
        self._report = report
        self._lock = threading.Lock()
        self._now = Snapshot(phase_since=time.monotonic())
        self._seconds: dict[str, float] = {}

    def snapshot(self) -> Snapshot:
        with self._lock:
            return self._now

    def update(self, **changes: int | None) -> None:
        """Set fields of the snapshot."""
        with self._lock:
            self._now = replace(self._now, **changes)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def stage(self, phase: str) -> Generator[None]:
        """The loop is in this phase until the block ends; its seconds add up until `take_seconds`."""
        begun = time.monotonic()
        with self._lock:
            self._now = replace(self._now, phase=phase, phase_since=begun)
            rollout_id = self._now.rollout_id
        if self._report is not None:
            self._report.opened(phase, rollout_id=rollout_id)
        try:
            yield
        finally:
            seconds = time.monotonic() - begun
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
            if self._report is not None:
                self._report.closed(phase, seconds=seconds, rollout_id=rollout_id)

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call. The loop's thread alone."""
        seconds, self._seconds = self._seconds, {}
        return seconds
