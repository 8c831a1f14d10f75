"""How fast a backlog may be read: at full speed while producers send little, at a fifth of it while they send much."""

import threading
import time

from services.metrics.writer import Committed

WINDOW_S = 0.5
BUSY_BYTES = 64 * 1024
"""Of other producers, within a window: more than log lines and heartbeats."""
SHARE = 0.2
"""Of one processor, while others are busy."""
MAX_REST_S = 0.25


class Pace:
    """Told of each commit in the writer's thread; asked by the tailer's."""

    def __init__(self, producer: str) -> None:
        self._producer = producer
        self._lock = threading.Lock()
        self._window_began_s, self._bytes, self._busy_until_s = 0.0, 0, 0.0

    def committed(self, committed: Committed) -> None:
        """What a commit brought."""
        others = sum(sum(map(len, b.bodies)) for b in committed.batches if b.producer != self._producer)
        if not others:
            return
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._window_began_s > WINDOW_S:
                self._window_began_s, self._bytes = now_s, 0
            self._bytes += others
            if self._bytes > BUSY_BYTES:
                self._busy_until_s = now_s + WINDOW_S

    @property
    def is_shared(self) -> bool:
        """Other producers send much."""
        return time.monotonic() < self._busy_until_s

    def rest_s(self, worked_s: float) -> float:
        """How long to leave the processor to others after so much work."""
        return min(MAX_REST_S, worked_s * (1 / SHARE - 1)) if self.is_shared else 0.0
