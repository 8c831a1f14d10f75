"""How late the event loop is, and a guard that tells when it stands still.

Owns one task that ticks and one thread that looks whether it does. The thread only reads: it never ends what is stuck.
"""

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator

import structlog

log = structlog.get_logger()

TICK_S = 0.25
WINDOW_S = 10.0
STUCK_S = 5.0
"""Without a tick for so long, the loop's stack is logged; once for each time."""
STACK_LINES = 12


class LoopLag:
    """The latest that a tick was, of the last one to two windows, so that no reader takes it from another."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._window_began = now()
        self._worst_s = self._worst_before_s = 0.0
        self.ticked_at = now()

    def ticked(self, due: float) -> None:
        """A tick that was due at a (monotonic) time came now."""
        now = self.ticked_at = self._now()
        if now - self._window_began >= WINDOW_S:
            self._worst_before_s, self._worst_s = self._worst_s, 0.0
            self._window_began = now
        self._worst_s = max(self._worst_s, now - due)

    def worst_s(self) -> float:
        """Seconds."""
        return max(self._worst_s, self._worst_before_s)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            due = self._now() + TICK_S
            await asyncio.sleep(TICK_S)
            self.ticked(due)


@contextlib.contextmanager
def guarded(lag: LoopLag, *, stuck_s: float = STUCK_S) -> Generator[None]:
    """While inside, say in the log where the loop stands when it has not ticked for stuck_s seconds.

    To be entered on the loop's thread, with `lag.run` running.
    """
    done = threading.Event()
    lag.ticked(time.monotonic())
    thread = threading.Thread(
        target=_look, args=(lag, threading.get_ident(), stuck_s, done), name="loop_guard", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(2.0)


def _look(lag: LoopLag, ident: int, stuck_s: float, done: threading.Event) -> None:
    told = 0.0
    while not done.wait(stuck_s / 4):
        ticked_at = lag.ticked_at
        silent_s = time.monotonic() - ticked_at
        if silent_s >= stuck_s and told != ticked_at:
            told = ticked_at
            frame = sys._current_frames().get(ident)
            stack = traceback.format_stack(frame)[-STACK_LINES:] if frame is not None else []
            log.error("event_loop_stuck", seconds=round(silent_s, 3), stack="".join(stack))
