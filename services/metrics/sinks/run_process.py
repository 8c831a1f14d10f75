"""A sink in a process of its own that keeps something for each run: it is told which run is which.

A run's name alone does not tell it from a run of the same name in another run directory; when the durable log first
heard of it does too, and stays the same for as long as there is that log.
"""

import asyncio
from collections.abc import Sequence, Set

from services.metrics.rows import Row
from services.metrics.sinks.process import ProcessSink
from services.metrics.sinks.sink import Cursor

TELL_LIMIT_S = 30.0


class RunProcessSink(ProcessSink):
    """Calls the process's `identify({run: identity})` before it gets the first row of a run."""

    _identified: frozenset[str] = frozenset()

    async def start(self, durable: Cursor) -> Cursor:
        """A new process knows no run."""
        self._identified = frozenset()
        return await super().start(durable)

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Tell of new runs, then hand over the rows."""
        await self._identify({row.run for row in rows})
        return await super().write(rows)

    async def _identify(self, runs: Set[str]) -> None:
        new = runs - self._identified
        if new:
            known = await asyncio.to_thread(self._context.reader.runs)
            identities = {run.name: f"{run.first_us:x}" for run in known if run.name in new}
            await self.call("identify", {name: identities.get(name, "0") for name in new}, timeout_s=TELL_LIMIT_S)
            self._identified |= new
