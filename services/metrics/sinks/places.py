"""How many sinks may be at work at once, where each costs a process of its own and there is one for every run.

Those that find no place wait, in the order in which they came; who has one gives it up when others wait.
Event loop only.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

NUM_PLACES = 10
"""Of wandb's processes, about 120 MB each."""
IDLE_S = 10.0
"""A sink that has had nothing to take for so long gives its place to one that waits."""
HOLD_S = 60.0
"""So does one that has had it for so long, whatever it still has to take."""


class Places:
    """A bounded number of them."""

    def __init__(self, count: int = NUM_PLACES) -> None:
        self._free = asyncio.Semaphore(count)
        self._num_waiting = 0

    @contextlib.asynccontextmanager
    async def one(self, given_up: asyncio.Event) -> AsyncGenerator[bool]:
        """Wait for a place, and hold it while entered. False: there is none, and given_up was set."""
        getting = asyncio.create_task(self._free.acquire())
        giving_up = asyncio.create_task(given_up.wait())
        try:
            self._num_waiting += 1
            try:
                await asyncio.wait({getting, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._num_waiting -= 1
                giving_up.cancel()
            yield getting.done()
        finally:
            if getting.done():
                self._free.release()
            getting.cancel()

    def wanted_back(self, *, held_s: float, idle_s: float) -> bool:
        """Whether who has a place for so long should give it up."""
        return self._num_waiting > 0 and (idle_s > IDLE_S or held_s > HOLD_S)
