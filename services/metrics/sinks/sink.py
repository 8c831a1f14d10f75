"""What a sink is, and the task that drives one: own cursor, own retries, own limits. A sink never slows another."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from services.metrics.rows import Row, RowReader
from services.metrics.writer import Writer

log = structlog.get_logger()
Result = TypeVar("Result")

MAX_ROWS = 256
MAX_BACKOFF_S = 30.0
LAGGING_AFTER_S = 10.0


@dataclass(frozen=True)
class Cursor:
    """How far a sink is."""

    row_id: int
    position: int = 0
    """Its own: for a file, the byte after the row."""


class Sink(Protocol):
    """Takes rows in order. Each call has a limit; one that is passed is cancelled, and `abort` called."""

    name: str
    start_timeout_s: float
    write_timeout_s: float
    finish_timeout_s: float

    async def start(self, durable: Cursor) -> Cursor:
        """Get ready; the cursor to go on from, at or after the durable one. May be called again after a failure."""

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Take rows; up to where they are safe if the sink were killed now."""

    async def finish(self) -> Cursor | None:
        """No more rows will come: complete what is written. The final cursor; None: as it was."""

    async def abort(self) -> None:
        """Let go of everything, after a failure."""


class SinkTask:
    """Drives one sink until it is closed. A failure is retried with back-off, for ever."""

    def __init__(self, sink: Sink, reader: RowReader, writer: Writer) -> None:
        self.sink = sink
        self.handed = 0
        """The last row that the sink has taken."""
        self.last_error = ""
        self.state = "starting"
        self._reader, self._writer = reader, writer
        self._new_rows = asyncio.Event()
        self._closing = asyncio.Event()
        self._moved = asyncio.Condition()
        self._behind_since: float | None = None
        self._backoff_s = 0.5
        self._task = asyncio.create_task(self._run(), name=f"sink-{sink.name}")

    def notify(self) -> None:
        """There are new rows. Event loop only."""
        self._new_rows.set()
        if self._behind_since is None:
            self._behind_since = time.monotonic()

    def shown_state(self) -> str:
        """starting, healthy, lagging, failing or closed."""
        behind = self._behind_since is not None and time.monotonic() - self._behind_since > LAGGING_AFTER_S
        return "lagging" if self.state == "healthy" and behind else self.state

    async def wait_handed(self, row_id: int) -> None:
        """Wait until the sink has taken this row."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.handed >= row_id)

    async def close(self, timeout_s: float) -> None:
        """Hand over what is left and finish, within timeout_s seconds; then stop whatever it does."""
        self._closing.set()
        self._new_rows.set()
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            log.warning("sink_cut_short", sink=self.sink.name, timeout_s=timeout_s)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2.0)
            await self.sink.abort()
        self.state = "closed"

    async def _run(self) -> None:
        while True:
            try:
                await self._drive()
                return
            except Exception as error:  # the top of a supervised task: whatever a sink's vendor raises
                await self._failed(error)
                if self._closing.is_set() and self._backoff_s > 2.0:
                    return  # it had its chances
                await self._pause()

    async def _drive(self) -> None:
        durable = Cursor(*self._reader.cursor(self.sink.name))
        cursor = await _limited(self.sink.start(durable), self.sink.start_timeout_s, "start")
        await self._advance(cursor.row_id)
        self.state = "healthy"
        while True:
            self._new_rows.clear()
            rows = await self._reader.async_after(self.handed, MAX_ROWS)
            if rows:
                safe = await _limited(self.sink.write(rows), self.sink.write_timeout_s, "write")
                await self._save(safe)
                await self._advance(rows[-1].row_id)
                self._recovered()
            elif self._closing.is_set():
                final = await _limited(self.sink.finish(), self.sink.finish_timeout_s, "finish")
                if final is not None:
                    await self._save(final)
                return
            else:
                self._behind_since = None
                await self._new_rows.wait()

    async def _save(self, cursor: Cursor) -> None:
        await asyncio.wrap_future(self._writer.set_cursor(self.sink.name, cursor.row_id, cursor.position))

    async def _advance(self, row_id: int) -> None:
        async with self._moved:
            self.handed = row_id
            self._moved.notify_all()

    def _recovered(self) -> None:
        if self.last_error:
            log.info("sink_recovered", sink=self.sink.name)
        self.state, self.last_error, self._backoff_s = "healthy", "", 0.5

    async def _failed(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self.last_error:  # once a cause, not at every try
            log.warning("sink_failing", sink=self.sink.name, error=text, retry_s=self._backoff_s)
        self.state, self.last_error = "failing", text
        try:
            await _limited(self.sink.abort(), 5.0, "abort")
        except Exception as second:
            log.warning("sink_abort_failed", sink=self.sink.name, error=repr(second))

    async def _pause(self) -> None:
        waits = asyncio.create_task(self._closing.wait())
        limit_s = min(self._backoff_s, 0.5) if self._closing.is_set() else self._backoff_s
        if self._closing.is_set():
            waits.cancel()
            await asyncio.sleep(limit_s)
        else:
            await asyncio.wait({waits}, timeout=limit_s)
            waits.cancel()
        self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2)


async def _limited(awaitable: Awaitable[Result], limit_s: float, what: str) -> Result:
    try:
        return await asyncio.wait_for(awaitable, limit_s)
    except TimeoutError as error:
        raise TimeoutError(f"{what} took longer than {limit_s:g} s") from error
