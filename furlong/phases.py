"""Tells the metrics service what a process is busy with, so that a phase that never ends is noticed."""

import contextlib
import time
from collections.abc import Generator

from furlong.telemetry import Telemetry


class PhaseReport:
    """Records of phases. Any thread; costs two records a phase."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def opened(self, phase: str, *, rollout_id: int | None = None) -> None:
        self._record(phase, "open", rollout_id, {})

    def closed(self, phase: str, *, seconds: float, rollout_id: int | None = None) -> None:
        self._record(phase, "closed", rollout_id, {"seconds": round(seconds, 6)})

    @contextlib.contextmanager
    def during(self, phase: str, *, rollout_id: int | None = None) -> Generator[None]:
        """Open until the block ends, however it does."""
        begun = time.monotonic()
        self.opened(phase, rollout_id=rollout_id)
        try:
            yield
        finally:
            self.closed(phase, seconds=time.monotonic() - begun, rollout_id=rollout_id)

    def _record(self, phase: str, state: str, rollout_id: int | None, more: dict[str, object]) -> None:
        about = {} if rollout_id is None else {"rollout_id": rollout_id}
        self._telemetry.record({"level": "debug", "event": "phase", "phase": phase, "state": state, **about, **more})
