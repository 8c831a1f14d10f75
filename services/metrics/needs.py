"""Tells retention, every second, up to where the sinks, and who watches for alerts, have what they follow."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any  # Any: a sink of rows or of batches

from services.metrics.alerts import ledger
from services.metrics.retention import Needs
from services.metrics.sinks.source import BatchSource
from services.metrics.sinks.task import SinkTask
from services.metrics.writer import Writer

INTERVAL_S = 1.0


async def tell_needs(writer: Writer, following: Callable[[], Iterable[SinkTask[Any]]]) -> None:
    """Until it is cancelled. following: all that need what they have not taken."""
    while True:
        rows, batches = {ledger.CURSOR: 0}, {}  # of alerts the cursor in the store counts
        for task in following():
            needs = batches if isinstance(task.source, BatchSource) else rows
            needs[task.cursor_name] = task.needed_after
        writer.retention.needs = Needs(rows, batches)
        await asyncio.sleep(INTERVAL_S)
