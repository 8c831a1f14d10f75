"""Checks the whole store while the service runs, in small steps, on a connection of its own that only reads.

Before the service serves only what is quick is checked (salvage.py). A page that cannot be read has the store set aside
and made anew; a batch whose text is not what was stored is marked, reported and no longer counted on.
"""

import asyncio
import contextlib
import sqlite3
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from services.metrics.rebuild import DAMAGED_CRC
from services.metrics.salvage import is_damage
from services.metrics.soundness import agrees, is_contribution, is_row
from services.metrics.store import open_reader
from services.metrics.writer import StoreFailed, Writer

log = structlog.get_logger()
Result = TypeVar("Result")

STEP_BATCHES = 32
STEP_ROWS = 8
PAUSE_S = 0.02
"""Between two steps, and at least three times what the last one took: most of the time is the service's."""
TABLE_LIMIT_S = 2.0
"""A table whose pages take longer is left to the reads that are made of it."""
_TABLES = (
    *("runs", "producers", "steps", "attempts", "contributions", "rows", "series", "points", "alerts"),
    *("cursors", "sinks", "marks", "totals"),
)


async def inspect(path: Path, writer: Writer) -> None:
    """Once through everything that is there now."""
    began = time.monotonic()
    try:
        damaged, unfinished = await _tables(path) or await _rows(path), await _batches(path, writer)
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            damaged, unfinished = str(error), 0
        else:
            log.warning("metrics_store_not_checked", error=str(error))
            return
    if damaged:
        writer.report_damage(damaged)
        return
    log.info("metrics_store_checked", seconds=round(time.monotonic() - began, 2), num_damaged_batches=unfinished)


async def _pause(began: float) -> None:
    """After a step that began then."""
    await asyncio.sleep(max(PAUSE_S, 3 * (time.monotonic() - began)))


async def _tables(path: Path) -> str:
    """What is wrong with the first table that is damaged. Empty: nothing is."""
    for table in _TABLES:
        began = time.monotonic()
        verdict = await asyncio.to_thread(_with_reader, path, lambda reader, name=table: _check_table(reader, name))
        if verdict != "ok":
            return f"table {table}: {verdict}"
        await _pause(began)
    return ""


def _check_table(reader: sqlite3.Connection, table: str) -> str:
    deadline = time.monotonic() + TABLE_LIMIT_S
    reader.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    try:
        return str(reader.execute(f"PRAGMA quick_check({table})").fetchone()[0])  # the names are ours
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            return "ok"
        raise


async def _rows(path: Path) -> str:
    """What is wrong with the first row or contribution that is no JSON. Empty: all are."""
    after, doubtful = 0, []
    while True:
        began = time.monotonic()
        found = await asyncio.to_thread(_with_reader, path, lambda reader, begin=after: _step_rows(reader, begin))
        if not found:
            break
        after = found[-1][0]
        if bad := [step_id for step_id, verdict in found if verdict is None]:
            return f"step {bad[0]}: its row or what its parts said is no JSON of ours"
        doubtful += [step_id for step_id, verdict in found if not verdict]
        await _pause(began)
    if not doubtful:
        return ""
    verdict = f"step {doubtful[0]} and {len(doubtful) - 1} more: the row is not what its parts come to"
    if any(path.parent.glob(f"{path.name}.damaged-*")):  # it was made anew already: that is no remedy
        log.error("metrics_rows_doubtful", reason=verdict)
        return ""
    return verdict


def _step_rows(reader: sqlite3.Connection, after: int) -> list[tuple[int, bool | None]]:
    """Some steps, and whether their rows are right. None: they cannot be read."""
    find = (
        "SELECT s.id, r.id, r.body FROM steps s LEFT JOIN rows r ON r.id = s.last_row_id"
        " WHERE s.id > ? ORDER BY s.id LIMIT ?"
    )
    said = "SELECT body FROM contributions WHERE step_id = ?"
    found: list[tuple[int, bool | None]] = []
    reader.execute("BEGIN")  # a row and its parts as of one moment
    for step_id, row_id, body in reader.execute(find, (after, STEP_ROWS)).fetchall():
        bodies = [contribution for (contribution,) in reader.execute(said, (step_id,))]
        is_read = (row_id is None or is_row(body)) and all(map(is_contribution, bodies))
        found.append((step_id, agrees(reader, step_id) if is_read else None))
    return found


async def _batches(path: Path, writer: Writer) -> int:
    """Read every batch that there was; how many were damaged."""
    last = await asyncio.to_thread(
        _with_reader, path, lambda reader: reader.execute("SELECT coalesce(max(id), 0) FROM batches").fetchone()[0]
    )
    after, num_damaged = 0, 0
    while after < last:
        began = time.monotonic()
        found = await asyncio.to_thread(_with_reader, path, lambda reader, begin=after: _step(reader, begin))
        if not found:
            break
        after = found[-1][0]
        damaged = [batch_id for batch_id, is_well in found if not is_well]
        if damaged:
            num_damaged += len(damaged)
            await _mark(writer, damaged)
        await _pause(began)
    return num_damaged


def _step(reader: sqlite3.Connection, after: int) -> list[tuple[int, bool]]:
    step = "SELECT id, crc, body FROM batches WHERE id > ? ORDER BY id LIMIT ?"
    return [
        (batch_id, crc == DAMAGED_CRC or (isinstance(body, bytes) and crc == zlib.crc32(body)))
        for batch_id, crc, body in reader.execute(step, (after, STEP_BATCHES))
    ]


async def _mark(writer: Writer, batch_ids: list[int]) -> None:
    log.error("metrics_batches_damaged", num_batches=len(batch_ids), first=batch_ids[0])
    mark = f"UPDATE batches SET crc = {DAMAGED_CRC} WHERE id = ?"

    def work(connection: sqlite3.Connection) -> None:
        connection.executemany(mark, [(batch_id,) for batch_id in batch_ids])

    with contextlib.suppress(StoreFailed):  # it is found again at the next start
        await asyncio.wrap_future(writer.execute(work))


def _with_reader(path: Path, ask: Callable[[sqlite3.Connection], Result]) -> Result:
    """Each step on a connection of its own: none holds back the write-ahead log."""
    with contextlib.closing(open_reader(path)) as reader:
        return ask(reader)
