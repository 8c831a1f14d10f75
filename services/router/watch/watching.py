"""What runs beside the requests while the router watches itself: ticks, sums of the log, rows of metrics."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator

from services.router.watch.loop_lag import guarded
from services.router.watch.observer import Observer
from services.router.watch.reporting import INTERVAL_S, Recorder, Reporter

TEND_S = 1.0
FORGET_EVERY = 10
"""Looks at the log between two looks at the workers."""


@contextlib.asynccontextmanager
async def watching(
    observer: Observer, recorder: Recorder | None = None, *, interval_s: float = INTERVAL_S
) -> AsyncGenerator[tuple["asyncio.Task[None]", ...]]:
    """The tasks, which never end by themselves, while inside. recorder: where rows go; None: nowhere."""
    reporter = None if recorder is None else Reporter(observer, recorder, interval_s=interval_s)
    tasks = [
        asyncio.create_task(observer.lag.run(), name="loop_lag"),
        asyncio.create_task(_tend(observer), name="observer"),
    ]
    if reporter is not None:
        tasks.append(asyncio.create_task(reporter.run(), name="router_rows"))
    try:
        with guarded(observer.lag):
            yield tuple(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if reporter is not None:
            await reporter.report()
        observer.access_log.tell_sums(everything=True)


async def _tend(observer: Observer) -> None:
    """What must not grow while nobody asks."""
    for number in itertools.count(1):
        await asyncio.sleep(TEND_S)
        observer.access_log.tell_sums()
        if number % FORGET_EVERY == 0:
            observer.forget_gone()
