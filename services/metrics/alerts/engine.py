"""The task that watches: takes rows from its durable cursor, records as they come, and the clock once a second.

Owns the rules' state. Never slows who writes: it reads behind them, a slice at a time, and what it cannot store it
holds until it can.
"""

import asyncio
import collections
import contextlib
import dataclasses
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
import structlog

from furlong.alertrules.choice import Chosen
from services.metrics.alerts import ledger
from services.metrics.alerts.alert import Alert, State
from services.metrics.alerts.core import AlertCore, Now, SinkFacts
from services.metrics.alerts.ledger import Ledger
from services.metrics.bell import News
from services.metrics.rows import Row, RowReader
from services.metrics.writer import StoreFailed, Writer

log = structlog.get_logger()

SLICE_ROWS = 32
"""Rows that are judged before the event loop gets another turn."""
TICK_S = 1.0
SAVE_S = 1.0
"""How long the cursor may lag behind what was judged; after a kill that is judged again, to the same end."""
MAX_RECORDS = 100_000
MAX_WARM_RUNS = 48
SLICE_RECORDS = 500
"""Judged at a time; between them the event loop has its turn."""
MAX_PENDING = 10_000
END_S = 2.0
"""How long what it does just now may take once it is to end."""
CLOSE_S = 3.0

Record = Mapping[str, Any]  # Any: a record's JSON


class AlertEngine:
    """Use within one event loop; `take_notable` is for any thread."""

    def __init__(
        self,
        chosen: Chosen,
        *,
        own_run: str,
        reader: RowReader,
        writer: Writer,
        sinks: Callable[[], Awaitable[Sequence[SinkFacts]]],
    ) -> None:
        self.ledger = Ledger(reader)
        self.on_alerts: list[Callable[[Sequence[Alert]], object]] = []
        """Called in the event loop with alerts that are in the store now."""
        self._core = AlertCore(chosen, own_run=own_run)
        self._chosen, self._reader, self._writer, self._sinks = chosen, reader, writer, sinks
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._records: collections.deque[tuple[str, Record]] = collections.deque(maxlen=MAX_RECORDS)
        self._warm: OrderedDict[str, None] = OrderedDict()
        self._pending: list[Alert] = []
        self._cursor = self._saved_cursor = 0
        self._saved_at = self._ticked_at = 0.0
        self._saved_services: bytes | None = None
        self._failing = ""
        self._begun = self._closing = False

    def firing(self) -> list[Alert]:
        """What fires now, oldest first."""
        return self._core.firing()

    def notify(self, news: News | None = None) -> None:
        """There are new rows. Event loop only."""
        self._wake.set()

    def take_notable(self, run: str, record: Record) -> None:
        """A record that rules may look at. Any thread; costs next to nothing."""
        self._records.append((run, record))

    async def run(self) -> None:
        """Until `close`. What fails is tried again: the store may be away for a while."""
        while not self._begun and not self._closing:
            self._begun = await self._tried(self._begin)
        while not self._closing:
            await self._tried(self.turn)
            if len(self._records) or self._wake.is_set() or self._closing:
                continue
            try:
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            except TimeoutError:
                continue

    async def turn(self) -> None:
        """Judge all that is there, and store what came of it."""
        self._wake.clear()
        await self._judge_records()
        await self._judge_rows()
        await self._look_at_the_clock()
        await self._save()

    async def close(self, running: "asyncio.Task[object]") -> None:
        """Have `run` end, judge what is left and note how far that was. running: the task of `run`."""
        self._closing = True
        self._wake.set()
        await asyncio.wait({running}, timeout=END_S)
        if not running.done():  # it waits for the store, which may still write what it has: not once more here
            running.cancel()
            return
        if not self._begun:
            return
        self._saved_at = self._ticked_at = 0.0
        with contextlib.suppress(StoreFailed, sqlite3.Error, OSError, TimeoutError):  # then the next start does
            await asyncio.wait_for(self.turn(), CLOSE_S)

    async def _tried(self, act: Callable[[], Awaitable[None]]) -> bool:
        try:
            await act()
        except (StoreFailed, sqlite3.Error, OSError) as error:
            if repr(error) != self._failing:  # once a cause
                log.warning("alerts_failing", error=repr(error))
            self._failing = repr(error)
            await asyncio.sleep(TICK_S)
            return False
        if self._failing:
            log.info("alerts_recovered")
        self._failing = ""
        return True

    async def _begin(self) -> None:
        firing, services, cursor = await asyncio.to_thread(
            lambda: (self.ledger.firing(), self.ledger.services(), self.ledger.cursor())
        )
        self._cursor = self._saved_cursor = cursor
        self._core.restore(firing, services, _now())
        for alert in firing:
            if alert.rule not in self._chosen.rules:
                self._pending.append(_ended(alert, "over: the rule is no longer watched"))

    async def _judge_records(self) -> None:
        now = _now()
        while self._records:
            for _ in range(min(SLICE_RECORDS, len(self._records))):
                run, record = self._records.popleft()
                self._pending += self._core.take_record(run, record, now)
            await asyncio.sleep(0)

    async def _judge_rows(self) -> None:
        while rows := await asyncio.to_thread(self._reader.after, self._cursor, SLICE_ROWS):
            for run in {row.run for row in rows}:
                await self._warm_up(run)
            now = _now()
            for row in rows:
                self._judge(row, now)
                self._cursor = row.row_id
            self._core.trim(self._warm)
            await self._save()
            await asyncio.sleep(0)

    def _judge(self, row: Row, now: Now) -> None:
        if not row.is_current:
            return
        facts = ledger.row_facts(row.run, row.body, row.emitted_us)
        if facts is not None:
            self._pending += self._core.take_row(facts, now)

    async def _warm_up(self, run: str) -> None:
        """See that a run's windows are there."""
        if run in self._warm:
            self._warm.move_to_end(run)
            return
        rows = await asyncio.to_thread(self.ledger.rows_before, run, self._cursor)
        self._core.warm_up(run, rows)
        self._warm[run] = None
        while len(self._warm) > MAX_WARM_RUNS:
            oldest, _ = self._warm.popitem(last=False)
            self._core.let_go(oldest)

    async def _look_at_the_clock(self) -> None:
        now = _now()
        if now.monotonic_s - self._ticked_at < TICK_S / 2:
            return
        self._ticked_at = now.monotonic_s
        if not self._cursor <= await asyncio.to_thread(self._reader.last_row_id):
            self._cursor = await asyncio.to_thread(self.ledger.cursor)  # the store was damaged, and made anew
        self._core.trim(self._warm)
        paused = bool(self._writer.failing or self._writer.holding)
        self._pending += self._core.tick(now, sinks=await self._sinks(), paused=paused)

    async def _save(self) -> None:
        """Alerts at once, the cursor now and then."""
        services = orjson.dumps(self._core.services())
        changed = services if services != self._saved_services else None
        now = time.monotonic()
        due = now - self._saved_at >= SAVE_S and (self._cursor != self._saved_cursor or changed is not None)
        if not self._pending and not due:
            return
        alerts, cursor = self._pending[:MAX_PENDING], self._cursor
        stored = await asyncio.wrap_future(
            self._writer.execute(lambda connection: ledger.write(connection, alerts, cursor, changed))
        )
        del self._pending[: len(alerts)]
        self._saved_cursor, self._saved_at = cursor, now
        self._saved_services = services
        if stored:
            for act in self.on_alerts:
                act(stored)


def _now() -> Now:
    return Now(time.monotonic(), time.time())


def _ended(alert: Alert, why: str) -> Alert:
    now_us = time.time_ns() // 1000
    return dataclasses.replace(alert, id=0, state=State.RESOLVED, summary=why, at_us=now_us, halt=False, evidence={})
