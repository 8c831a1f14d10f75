"""Tells the event loop, from the writer's thread, that there is something new; many commits may be one ring."""

import asyncio
import contextlib
from collections.abc import Callable

CALM_S = 0.1


class Bell:
    """Rows ring at once; what is only records rings a little later, however many commits there are meanwhile."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._act = act
        self._soon = self._later = False

    def ring(self, *, at_once: bool) -> None:
        """Any thread."""
        if self._soon or (self._later and not at_once):
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if at_once:
                self._soon = True
                self._loop.call_soon_threadsafe(self._fire)
            else:
                self._later = True
                self._loop.call_soon_threadsafe(self._loop.call_later, CALM_S, self._fire)

    def _fire(self) -> None:
        self._soon = self._later = False
        self._act()
