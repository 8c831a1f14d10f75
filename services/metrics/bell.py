"""Tells the event loop, from the writer's thread, what is new; many commits may be one ring."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from services.metrics.writer import Committed

CALM_S = 0.1


@dataclass
class News:
    """What came into the store since the last ring."""

    runs: set[str] = field(default_factory=set)
    """Those that have new rows."""
    last_row_id: int = 0
    """The newest of all rows. 0: no new rows. Of all up to it there has been news, this one included."""
    has_batches: bool = False


class Bell:
    """Rows ring at once; what is only records rings a little later, however many commits there are meanwhile."""

    def __init__(self, act: Callable[[News], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._act = act
        self._lock = threading.Lock()
        self._news = News()
        self._soon = self._later = False

    def ring(self, committed: Committed) -> None:
        """Any thread, in the order of the commits."""
        with self._lock:
            self._news.runs.update(row.run for row in committed.rows)
            self._news.last_row_id = max((row.row_id for row in committed.rows), default=self._news.last_row_id)
            self._news.has_batches |= bool(committed.batches)
            at_once = bool(committed.rows)
            if self._soon or (self._later and not at_once):
                return
            self._soon, self._later = self._soon or at_once, self._later or not at_once
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if at_once:
                self._loop.call_soon_threadsafe(self._fire)
            else:
                self._loop.call_soon_threadsafe(self._loop.call_later, CALM_S, self._fire)

    def _fire(self) -> None:
        with self._lock:
            news, self._news = self._news, News()
            self._soon = self._later = False
        if news.runs or news.has_batches:
            self._act(news)
