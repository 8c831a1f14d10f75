"""The task that drives one sink: own cursor, own retries, own limits. A sink never slows another, nor its source."""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from furlong.jsonline import NO_SECRETS, Secrets
from services.metrics.bell import News
from services.metrics.rows import RowReader
from services.metrics.sinks.places import Places
from services.metrics.sinks.sink import Cursor, Refused, Sink, TakenInPart
from services.metrics.sinks.source import NOTHING, Bites, RowSource, Source
from services.metrics.writer import Writer

log = structlog.get_logger()
Item = TypeVar("Item")
Result = TypeVar("Result")

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_ERROR_CHARS = 1_000
MAX_TOLD_REFUSALS = 100
CLOSING_TRIES_S = 2.0


@dataclass(frozen=True)
class SinkState:
    """What a sink's task says of it."""

    name: str
    kind: str
    state: str
    """starting, healthy, lagging, failing or closed."""
    num_rows_behind: int
    seconds_behind: float
    """Since the oldest row that it has not taken was handed on. 0: it has all."""
    last_error: str
    """Why it fails. Empty: it does not."""
    num_rows_refused: int
    num_values_left_out: int
    """Values or log records of rows that it took, which its other side has no place for."""


class SinkTask(Generic[Item]):
    """Drives one sink until it is closed. A failure is retried with back-off and jitter, for ever."""

    def __init__(
        self,
        sink: Sink[Item],
        reader: RowReader,
        writer: Writer,
        source: Source[Item] | None = None,
        *,
        kind: str = "",
        places: Places | None = None,
        secrets: Secrets = NO_SECRETS,
    ) -> None:
        """places: of which it needs one to be at work, when it is a sink that may be idle.

        secrets: what is told of no error, whatever a sink's vendor puts into it.
        """
        self.sink, self.kind = sink, kind or sink.name
        self.source: Source[Item] = source or RowSource(reader)  # type: ignore[assignment]  # the default: Item is Row
        self.handed = 0
        """The last row that the sink has taken."""
        self.safe = 0
        """The last row that is safe there."""
        self.last_error = ""
        self.state = "starting"
        self.num_refused = 0
        self._places = places if sink.idle_after_s is not None else None
        self._bites = Bites(self.source)
        self._reader, self._writer, self._secrets = reader, writer, secrets
        self.cursor_name = sink.cursor_name or sink.name
        """Under which its cursor is kept."""
        self._saved: Cursor | None = None
        self._new_rows = asyncio.Event()
        self._has_all = False
        """When it looked last there was nothing more to take."""
        self._clear_through = 0
        """Up to this row there is none that it has yet to take; of one run, what follows its last row is others'."""
        self._closing = asyncio.Event()
        self._hurry = asyncio.Event()
        """Somebody waits for what it is to take: no gathering."""
        self._num_waiting = 0
        self._moved = asyncio.Condition()
        self._backoff_s = FIRST_BACKOFF_S
        self._asked_for_s = 0.0
        self._ticked_at = self._looked_at = 0.0
        self._took_all_at = -math.inf
        """Of what came before, it has taken all."""
        self._task = asyncio.create_task(self._run(), name=f"sink-{sink.name}")

    @property
    def needed_after(self) -> int:
        """Rows up to this one may go from the durable log, as far as this sink is concerned."""
        return max(self.safe, self._clear_through) if self.safe >= self.handed else self.safe

    def notify(self, news: News | None = None) -> None:
        """There is something new, or None: there may be. Event loop only, each piece of news in its order."""
        if news is None or self.source.concerns(news):
            self._new_rows.set()
        elif self.has_all:
            self._clear_through = max(self._clear_through, self.source.passed(news))

    @property
    def has_all(self) -> bool:
        """Whether there is nothing that it has not taken, as far as there has been news."""
        return self._has_all and not self._new_rows.is_set()

    async def status(self, *, exact: bool = True) -> SinkState:
        """How it is now. exact: also how many rows of the last moments it has not taken; else the store is asked only
        when it may lag."""
        place = self.safe if self.sink.counts_safe or self.state == "failing" else self.handed
        nothing = place == self.handed and (self.has_all or (not exact and self._is_recent()))
        behind = NOTHING if nothing else await asyncio.to_thread(self.source.behind, place)
        seconds = max(0.0, time.time() - behind.oldest_us / 1e6) if behind.oldest_us else 0.0
        state, why = self.state, self.last_error
        if state == "healthy" and self.sink.trouble:
            state, why = "failing", self._secrets.redact(self.sink.trouble)
        elif state == "healthy" and seconds > self.sink.lagging_after_s:
            state = "lagging"
        return SinkState(
            name=self.sink.name,
            kind=self.kind,
            state=state,
            num_rows_behind=behind.num_items,
            seconds_behind=seconds,
            last_error=why,
            num_rows_refused=self.num_refused,
            num_values_left_out=self.sink.num_left_out,
        )

    async def wait_handed(self, row_id: int) -> None:
        """Wait until the sink has taken this row."""
        self._num_waiting += 1
        self._hurry.set()
        try:
            async with self._moved:
                await self._moved.wait_for(lambda: self.handed >= row_id)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting and not self._closing.is_set():
                self._hurry.clear()

    async def close(self, timeout_s: float) -> None:
        """Hand over what is left and finish, within timeout_s seconds; then stop whatever it does."""
        self._closing.set()
        self._hurry.set()
        self._new_rows.set()
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            log.warning("sink_cut_short", sink=self.sink.name, timeout_s=timeout_s)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2.0)
            await self._abort()
        self.state = "closed"

    async def _run(self) -> None:
        while True:
            try:
                await self._drive()
                return
            except Exception as error:  # the top of a supervised task: whatever a sink's vendor raises
                await self._failed(error)
                if self._closing.is_set() and self._backoff_s > CLOSING_TRIES_S:
                    return  # it had its chances
                await self._pause()

    async def _drive(self) -> None:
        while True:
            self._saved = Cursor(*await asyncio.to_thread(self._reader.cursor, self.cursor_name))
            self.handed = self.safe = self._saved.row_id  # shown as far behind as it is, also if it cannot start
            self._has_all, self._clear_through = False, 0
            if self.sink.idle_after_s is not None and not await self._wait_for_first():
                return
            if self._places is None:
                await self._work(self._saved)
            else:
                async with self._places.one(self._closing) as has_place:
                    if has_place:
                        await self._work(self._saved)
            if self._closing.is_set():
                return

    async def _work(self, durable: Cursor) -> None:
        """From start to finish."""
        cursor = await _limited(self.sink.start(durable), self.sink.start_timeout_s, "start")
        await self._save(cursor)
        await self._advance(cursor.row_id)
        await self._feed()
        await self._save(await _limited(self.sink.finish(), self.sink.finish_timeout_s, "finish"))

    async def _wait_for_first(self) -> bool:
        """Whether there is something to take; False: nothing, and it closes."""
        while True:
            if await self._look(lambda: self.source.after(self.handed, 1)):
                return True
            if self._closing.is_set():
                return False
            self._recovered()
            await self._new_rows.wait()

    async def _feed(self) -> None:
        """Hand over what comes, until it closes, has been idle for long, or another waits for its place."""
        begun = idle_since = self._ticked_at = time.monotonic()
        while not self._should_leave(begun, idle_since):
            items = await self._look(lambda: self._bites.after(self.handed))
            if items:
                await self._hand(items)
                idle_since = time.monotonic()
                if not self._bites.is_full:
                    self._took_all_at = self._looked_at
                    await self._let_gather()
            elif self._closing.is_set():
                return
            else:
                self._took_all_at = self._looked_at
                self._recovered()
                idle_s = time.monotonic() - idle_since
                if self.sink.idle_after_s is not None and idle_s > self.sink.idle_after_s:
                    return
                await self._wait_for_more()
            await self._tick_when_due()

    def _is_recent(self) -> bool:
        """Whether all that it has not taken came a moment ago."""
        return self.state == "healthy" and time.monotonic() - self._took_all_at < self.sink.lagging_after_s

    async def _look(self, find: Callable[[], Sequence[Item]]) -> Sequence[Item]:
        self._new_rows.clear()
        self._has_all, looked_at = False, time.monotonic()
        newest, items = await asyncio.to_thread(lambda: (self.source.newest_of_others(), find()))
        self._has_all = not items
        if not items:
            self._clear_through = max(self._clear_through, newest)
        self._looked_at = looked_at
        return items

    def _should_leave(self, begun: float, idle_since: float) -> bool:
        now = time.monotonic()
        places = None if self._closing.is_set() else self._places
        return places is not None and places.wanted_back(held_s=now - begun, idle_s=now - idle_since)

    async def _hand(self, items: Sequence[Item]) -> None:
        through = self.source.id_of(items[-1])
        try:
            safe = await _limited(self.sink.write(items), self.sink.write_timeout_s, "write")
            refused: Sequence[Refused] = safe.refused
        except Refused as one:
            safe, refused, through = Cursor(one.row_id, self._saved.position if self._saved else 0), [one], one.row_id
        except TakenInPart as part:
            await self._take(part.cursor, part.cursor.refused, part.cursor.row_id)
            raise (part.__cause__ or part) from None
        await self._take(safe, refused, through)
        self._recovered()

    async def _take(self, safe: Cursor, refused: Sequence[Refused], through: int) -> None:
        for one in refused:
            self._count(one)
        await self._save(safe)
        await self._advance(through)

    async def _wait_for_more(self) -> None:
        """Until there is news, or it is time for something else."""
        limits = [] if self.sink.idle_after_s is None else [self.sink.idle_after_s]
        if self.sink.tick_s is not None:
            limits.append(max(0.0, self._ticked_at + self.sink.tick_s - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._new_rows.wait(), min(limits) if limits else None)

    async def _tick_when_due(self) -> None:
        """By the clock: there may be no quiet moment for hours."""
        if self.sink.tick_s is not None and time.monotonic() - self._ticked_at >= self.sink.tick_s:
            self._ticked_at = time.monotonic()
            await self._save(await _limited(self.sink.tick(), self.sink.write_timeout_s, "tick"))

    async def _let_gather(self) -> None:
        """A write costs about the same for one row as for twenty: the next one waits for more of them."""
        if self.sink.gather_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self.sink.gather_s)

    def _count(self, refused: Refused) -> None:
        self.num_refused += 1
        if self.num_refused <= MAX_TOLD_REFUSALS:
            reason = self._secrets.redact(refused.reason)[:MAX_ERROR_CHARS]
            log.warning("sink_refused_row", sink=self.sink.name, row=refused.row_id, reason=reason)

    async def _save(self, cursor: Cursor | None) -> None:
        if cursor is None:
            return
        self.safe = cursor.row_id
        kept = Cursor(cursor.row_id, cursor.position)
        if kept != self._saved:
            await asyncio.wrap_future(self._writer.set_cursor(self.cursor_name, kept.row_id, kept.position))
            self._saved = kept

    async def _advance(self, row_id: int) -> None:
        async with self._moved:
            self.handed = row_id
            self._moved.notify_all()

    def _recovered(self) -> None:
        if self.last_error:
            log.info("sink_recovered", sink=self.sink.name)
        self.state, self.last_error, self._backoff_s = "healthy", "", FIRST_BACKOFF_S

    async def _failed(self, error: Exception) -> None:
        text = self._secrets.redact(f"{type(error).__name__}: {error}")[:MAX_ERROR_CHARS]
        if text != self.last_error:  # once a cause, not at every try
            log.warning("sink_failing", sink=self.sink.name, error=text, retry_s=self._backoff_s)
        self.state, self.last_error = "failing", text
        self._asked_for_s = getattr(error, "retry_after_s", 0.0)
        await self._abort()

    async def _abort(self) -> None:
        try:
            await _limited(self.sink.abort(), 5.0, "abort")
        except Exception as second:  # whatever a sink's vendor raises
            text = self._secrets.redact(repr(second))[:MAX_ERROR_CHARS]
            log.warning("sink_abort_failed", sink=self.sink.name, error=text)

    async def _pause(self) -> None:
        """Until the next try; a close ends it early, and is then tried a few times in quick succession."""
        limit_s = self._backoff_s * random.uniform(0.5, 1.0)  # sinks of many services do not come back all at once
        limit_s = max(limit_s, self._asked_for_s)
        self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2)
        if self._closing.is_set():
            await asyncio.sleep(min(limit_s, FIRST_BACKOFF_S))
            return
        try:
            await asyncio.wait_for(self._closing.wait(), limit_s)
        except TimeoutError:
            return
        self._backoff_s = FIRST_BACKOFF_S  # it closes: a few tries more


async def _limited(awaitable: Awaitable[Result], limit_s: float, what: str) -> Result:
    try:
        return await asyncio.wait_for(awaitable, limit_s)
    except TimeoutError as error:
        raise TimeoutError(f"{what} took longer than {limit_s:g} s") from error
