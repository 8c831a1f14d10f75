"""Tells retention, every second, up to where the sinks, and who watches for alerts, have what they follow."""

import asyncio

from services.metrics.alerts import ledger
from services.metrics.retention import Needs
from services.metrics.sinks.manager import SinkManager
from services.metrics.sinks.source import BatchSource
from services.metrics.writer import Writer

INTERVAL_S = 1.0


async def tell_needs(writer: Writer, sinks: SinkManager) -> None:
    """Until it is cancelled."""
    while True:
        rows = {task.cursor_name: task.needed_after for task in sinks if not isinstance(task.source, BatchSource)}
        batches = {task.cursor_name: task.needed_after for task in sinks if isinstance(task.source, BatchSource)}
        writer.retention.needs = Needs({**rows, ledger.CURSOR: 0}, batches)  # of alerts the cursor in the store counts
        await asyncio.sleep(INTERVAL_S)
