"""Tells the metrics service that an engine that was gone serves again; that it is gone stands in the log."""

from furlong.telemetry import Telemetry
from services.rollout.fleet import GONE, READY, Engine


class EngineNews:
    """A listener of the fleet."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._gone: set[str] = set()

    def take(self, engine: Engine) -> None:
        """An engine's state changed."""
        if engine.state == GONE:
            self._gone.add(engine.engine_id)
        elif engine.state == READY and engine.engine_id in self._gone:
            self._gone.discard(engine.engine_id)
            self._telemetry.record({"level": "info", "event": "engine_ready", "engine": engine.engine_id})
