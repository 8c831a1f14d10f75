"""The event loop's lag is seen, and a loop that stands still is told where it stands."""

import asyncio
import threading
import time

import pytest

from services.router.watch import loop_lag
from services.router.watch.loop_lag import WINDOW_S, LoopLag, guarded
from tests.router.waiting import eventually
from tests.router.watch.passages import Clock


def test_worst_tick_is_told_for_one_to_two_windows() -> None:
    clock = Clock()
    lag = LoopLag(now=clock)
    clock.at += 3
    lag.ticked(clock.at - 2)
    told = []
    for _ in range(3):
        clock.at += WINDOW_S / 2 + 0.1
        lag.ticked(clock.at)
        told.append(lag.worst_s())
    assert told == [2, 2, 2]
    for _ in range(2):
        clock.at += WINDOW_S
        lag.ticked(clock.at)
    assert lag.worst_s() == 0


async def test_loop_that_is_held_up_has_lag() -> None:
    lag = LoopLag()
    ticking = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    hold_up(loop_lag.TICK_S + 0.2)
    await eventually(lambda: lag.worst_s() >= 0.15, "the lag")
    ticking.cancel()


def hold_up(seconds: float) -> None:
    """Without a turn of the loop: what is tested."""
    time.sleep(seconds)


def hold_up_the_loop(told: threading.Event) -> None:
    """Until it was told."""
    assert told.wait(10)


async def test_stuck_loop_is_told_once_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, told = [], threading.Event()

    class Log:
        def error(self, event: str, **fields: object) -> None:
            lines.append((event, fields))
            told.set()

    monkeypatch.setattr(loop_lag, "log", Log())
    lag = LoopLag()
    ticking = asyncio.create_task(lag.run())
    with guarded(lag, stuck_s=0.2):
        hold_up_the_loop(told)
        hold_up(0.2)
    ticking.cancel()
    [(event, fields)] = lines
    assert event == "event_loop_stuck" and "hold_up_the_loop" in str(fields["stack"])
    assert "loop_guard" not in [thread.name for thread in threading.enumerate()]
