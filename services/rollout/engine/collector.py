"""Waits, on the HTTP side, for samples that the model thread works on.

It owns the bridge between the two threads: events arrive in one call a step. It must never leave a sample running
when the one who waited for it is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from services.rollout.engine.sample import Sample
from services.rollout.engine.scheduler import Event, Scheduler


class Collector:
    """Submits samples and hands out what becomes of them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.active: set[Sample] = set()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say which loop handlers run on."""
        self._loop = loop

    def deliver(self, events: list[Event]) -> None:
        """Called on the model thread after each step that had events."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_dispatch, events)

    async def finish(self, scheduler: Scheduler, samples: Sequence[Sample]) -> None:
        """Run samples to their end; aborts them if the caller is cancelled."""
        done = asyncio.get_running_loop().create_future()
        left = len(samples)

        def on_event(sample: Sample, _count: int) -> None:
            nonlocal left
            if sample.finish_reason is not None:
                self.active.discard(sample)
                left -= 1
                if left == 0 and not done.done():
                    done.set_result(None)

        self._start(scheduler, samples, on_event)
        try:
            await done
        finally:
            self._abort_unfinished(scheduler, samples)

    async def stream(
        self, scheduler: Scheduler, samples: Sequence[Sample]
    ) -> AsyncIterator[tuple[int, Sample, int, bool]]:
        """Yield (index, sample, number of tokens, last) as tokens come; a slow client skips steps, not tokens."""
        index = {sample: at for at, sample in enumerate(samples)}
        news: dict[Sample, int] = {}
        wake = asyncio.Event()

        def on_event(sample: Sample, count: int) -> None:
            if sample.finish_reason is not None:
                self.active.discard(sample)
            news[sample] = count
            wake.set()

        self._start(scheduler, samples, on_event)
        left = set(samples)
        try:
            while left:
                await wake.wait()
                wake.clear()
                batch = dict(news)
                news.clear()
                for sample, count in batch.items():
                    if sample in left:
                        last = sample.finish_reason is not None and count == len(sample.output_ids)
                        if last:
                            left.discard(sample)
                        yield index[sample], sample, count, last
        finally:
            self._abort_unfinished(scheduler, samples)

    def _start(self, scheduler: Scheduler, samples: Sequence[Sample], on_event: object) -> None:
        now = time.time()
        for sample in samples:
            sample.on_event = on_event  # type: ignore[assignment]
            sample.dispatched = now
        self.active.update(samples)
        scheduler.submit(samples)

    def _abort_unfinished(self, scheduler: Scheduler, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.finish_reason is None:
                self.active.discard(sample)
                scheduler.abort_sample(sample)


def _dispatch(events: list[Event]) -> None:
    for sample, count in events:
        if sample.on_event is not None:
            sample.on_event(sample, count)
