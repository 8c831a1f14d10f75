"""Collects what producers left in the spool and will not deliver themselves: killed ones, and forked children.

A spool that a living process holds is left alone. What is delivered keeps the producer's numbers: none is taken twice.
"""

import asyncio
import contextlib
from pathlib import Path

import structlog

from furlong.spool import Spool, left_over
from services.metrics.intake import RecordsIn
from services.metrics.writer import StoreFailed, Writer

log = structlog.get_logger()

INTERVAL_S = 10.0
MAX_BATCH_RECORDS = 1024
MAX_BATCH_BYTES = 4 * 1024 * 1024


async def collect_until(stopping: asyncio.Event, folder: Path, writer: Writer) -> None:
    """Look every INTERVAL_S seconds, at once first, and once more at the end: producers that ended before the service
    does may have left something."""
    is_last = False
    while not is_last:
        is_last = stopping.is_set()
        await collect(folder, writer)
        if not is_last:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), INTERVAL_S)


async def collect(folder: Path, writer: Writer) -> int:
    """Deliver what is left over now; how many records."""
    num_records = 0
    for spool in await asyncio.to_thread(left_over, folder):
        try:
            num_records += await _deliver(spool, writer)
        except (StoreFailed, OSError) as error:  # it stays there for the next time
            log.warning("spool_not_collected", spool=spool.stem, error=str(error))
        finally:
            spool.release()
    return num_records


async def _deliver(spool: Spool, writer: Writer) -> int:
    num_records = 0
    while batch := await asyncio.to_thread(spool.read, max_records=MAX_BATCH_RECORDS, max_bytes=MAX_BATCH_BYTES):
        bodies = tuple(record.body for record in batch.records)
        taken = RecordsIn(batch.producer, batch.incarnation, batch.first_sequence, bodies)
        await asyncio.wrap_future(writer.submit(taken))
        spool.acknowledge(batch.last_sequence)
        num_records += len(bodies)
    log.info("spool_collected", spool=spool.stem, num_records=num_records, num_damaged=spool.num_damaged)
    return num_records
