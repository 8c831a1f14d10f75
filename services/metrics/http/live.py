"""GET /api/live: records, rows and alerts as they come, as server-sent events; from a place in the store if asked.

An event's id is a place: the ids of the newest record, row and alert up to it. A client that comes back with it (the
header Last-Event-ID) is shown everything since, from the store, and then what comes, each once.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request, Response
from sse_starlette import EventSourceResponse

from furlong.asking.filters import LogFilter
from furlong.asking.store import RECORD_BITS, StoreReader
from services.metrics.feed import AlertChange, Feed, Item, TooManyListeners
from services.metrics.http.asking import Asker, Axis, Level, Run, level_of, line_form, row_form
from services.metrics.http.errors import Problem
from services.metrics.queries import Queries
from services.metrics.rows import Row, StoredBatch

KINDS = ("record", "row", "alert")
PING_S = 15
REPLAY_BATCHES = 16
REPLAY_ROWS = 1000
SEND_BYTES = 64 * 1024
SEND_TIMEOUT_S = 300.0
_PLACE = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})\.([0-9]{1,18})")


@dataclass(frozen=True)
class Place:
    """How far somebody has seen."""

    record_id: int
    row_id: int
    alert_id: int

    def __str__(self) -> str:
        return f"{self.record_id}.{self.row_id}.{self.alert_id}"


@dataclass(frozen=True)
class Wanted:
    """What somebody wants to be shown."""

    kinds: frozenset[str]
    lines: LogFilter
    axis: str | None

    def has_row(self, run: str, body: bytes) -> bool:
        """Whether a row is wanted."""
        if "row" not in self.kinds or (self.lines.run is not None and run != self.lines.run):
            return False
        if self.axis is None and self.lines.rollout_id is None and self.lines.text is None:
            return True
        if not self.lines.may_match(body):
            return False
        row = orjson.loads(body)
        of_axis = self.axis is None or row["axis"] == self.axis
        return of_axis and self.lines.rollout_id in (None, row.get("rollout_id"))


class Stream:
    """One client's events."""

    def __init__(self, asker: Asker, feed: Feed, wanted: Wanted, place: Place | None) -> None:
        self._asker, self._feed, self._wanted = asker, feed, wanted
        self._listener = feed.listen()
        self._asked = place
        self._place = place or Place(0, 0, 0)

    async def events(self) -> AsyncGenerator[bytes]:
        """Until the client goes or the service stops."""
        try:
            now = await self._now()
            self._place = self._asked or now
            if self._place.record_id > now.record_id or self._place.row_id > now.row_id:
                self._place = now  # of another store
                yield _event("reset", self._place, {"reason": "the store is another one: what was before is not shown"})
            yield _event("hello", self._place, {"place": str(self._place)})
            async for chunk in self._replay():
                yield chunk
            while not self._listener.closed:
                num_lost, items = await self._listener.next(PING_S)
                if num_lost:
                    yield _event("gap", None, {"num_lost": num_lost, "place": str(self._place)})
                for chunk in await self._selected(items):
                    yield chunk
        finally:
            self._feed.leave(self._listener)

    async def _replay(self) -> AsyncGenerator[bytes]:
        """From the store, up to where the queue goes on. What is queued meanwhile is in the store too, and dropped."""
        while not self._listener.closed:
            self._listener.drop_all()
            items = await self._asker.ask(partial(_after, place=self._place))
            for chunk in await self._selected(items):
                yield chunk
            if not items:
                return

    async def _selected(self, items: list[Item]) -> list[bytes]:
        if sum(len(item.bodies) if isinstance(item, StoredBatch) else 1 for item in items) > 200:
            return await asyncio.to_thread(lambda: list(self._chunks(items)))
        return list(self._chunks(items))

    def _chunks(self, items: Iterable[Item]) -> Iterator[bytes]:
        """What is wanted of it, encoded, in pieces that are worth sending."""
        waiting, size = [], 0
        for item in items:
            for event in self._encoded(item):
                waiting.append(event)
                size += len(event)
                if size >= SEND_BYTES:
                    yield b"".join(waiting)
                    waiting, size = [], 0
        if waiting:
            yield b"".join(waiting)

    def _encoded(self, item: Item) -> Iterator[bytes]:
        """What was seen already, by the replay, is left out."""
        if isinstance(item, StoredBatch):
            yield from self._records(item)
        elif isinstance(item, Row):
            if item.row_id > self._place.row_id:
                self._place = replace(self._place, row_id=item.row_id)
                if self._wanted.has_row(item.run, item.body):
                    yield _raw("row", self._place, row_form(item.row_id, item.emitted_us, item.body))
        elif item.alert_id > self._place.alert_id:
            self._place = replace(self._place, alert_id=item.alert_id)
            if "alert" in self._wanted.kinds and self._wanted.lines.run in (None, item.run):
                yield _raw("alert", self._place, item.body)

    def _records(self, batch: StoredBatch) -> Iterator[bytes]:
        first = batch.batch_id << RECORD_BITS
        last = first + len(batch.bodies) - 1
        lines = self._wanted.lines
        is_wanted = "record" in self._wanted.kinds and lines.run in (None, batch.run) and batch.top_level >= lines.level
        seen = self._place.record_id
        for index, body in enumerate(batch.bodies if is_wanted and last > seen else ()):
            record_id = first + index
            if record_id > seen and lines.match(body) is not None:
                self._place = replace(self._place, record_id=record_id)
                yield _raw("record", self._place, line_form(record_id, batch.received_us, body))
        self._place = replace(self._place, record_id=max(self._place.record_id, last))

    async def _now(self) -> Place:
        ids = await self._asker.ask(lambda store: store.ids())
        return Place(ids.record_id, ids.row_id, ids.alert_id)


def router(queries: Queries, feed: Feed) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["live"])
    asker = Asker(queries)

    @routes.get(
        "/api/live",
        summary="Records, rows and alerts as they come",
        response_class=Response,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE}}}},
    )
    async def live(
        request: Request,
        run: Run = None,
        kinds: Annotated[str, Query(description="Of record, row, alert, with commas between.")] = "record,row,alert",
        service: Annotated[str | None, Query(description="Lines of this service; no rows then.")] = None,
        instance: Annotated[str | None, Query(description="Lines of this instance; no rows then.")] = None,
        level: Level = "info",
        rollout_id: Annotated[int | None, Query(description="Of this rollout.")] = None,
        text: Annotated[str | None, Query(description="Holds this, in letters of any case.", max_length=1000)] = None,
        axis: Axis = None,
        place: Annotated[str | None, Query(description="As the header Last-Event-ID.")] = None,
    ) -> Response:
        """Server-sent events: `record` {"id", "received", "record"}, `row`, `alert`; `hello` at the beginning with the
        place; `gap` {"num_lost"} when the client is too slow: it may come back with the last id that it has seen, and
        gets everything from the store. Every event's id can be sent back as Last-Event-ID.
        """
        chosen = frozenset(kinds.split(","))
        if not chosen <= set(KINDS):
            raise Problem(400, f"kinds must be of {', '.join(KINDS)}, got {kinds[:100]!r}", "For example kinds=row.")
        if service is not None or instance is not None:
            chosen -= {"row"}
        wanted = Wanted(chosen, LogFilter(run, service, instance, level_of(level), rollout_id, text), axis)
        seen = _place_of(request.headers.get("last-event-id") or place)
        try:
            stream = Stream(asker, feed, wanted, seen)
        except TooManyListeners:
            raise Problem(503, "too many clients listen", "Come back later.", retry_after_s=30) from None
        return EventSourceResponse(stream.events(), ping=PING_S, sep="\n", send_timeout=SEND_TIMEOUT_S)

    return routes


def _after(store: StoreReader, place: Place) -> list[Item]:
    """The next items of the store."""
    items: list[Item] = []
    first = (place.record_id + 1) >> RECORD_BITS  # the batch that the place is in, if it is not at its end
    for batch_id, run, received_us, top_level, body in store.batches_after(first - 1, limit=REPLAY_BATCHES):
        items.append(StoredBatch(batch_id, run, "", 0, received_us, tuple(body.split(b"\n")), top_level))
    for row_id, emitted_us, body in store.rows(after=place.row_id, last=REPLAY_ROWS):
        items.append(Row(row_id, orjson.loads(body)["run"], body, None, True, emitted_us))
    for alert in store.alerts(after=place.alert_id, last=REPLAY_ROWS):
        items.append(AlertChange(int(str(alert["id"])), str(alert["run"]), orjson.dumps(alert)))
    return items


def _place_of(text: str | None) -> Place | None:
    if not text:
        return None
    found = _PLACE.fullmatch(text.strip())
    if found is None:
        raise Problem(400, f"a place is RECORD.ROW.ALERT, got {text[:100]!r}", "Send an event's id, or none.")
    return Place(*map(int, found.groups()))


def _event(name: str, place: Place | None, tree: object) -> bytes:
    return _raw(name, place, orjson.dumps(tree))


def _raw(name: str, place: Place | None, data: bytes) -> bytes:
    head = f"event: {name}\n" + (f"id: {place}\n" if place is not None else "")
    return head.encode() + b"data: " + data + b"\n\n"


_EXAMPLE = """event: hello
id: 131071.11.0
data: {"place":"131071.11.0"}

event: row
id: 131071.12.0
data: {"id":12,"run":"arith","axis":"rollout/step","step":11,"values":{"perf/step_time":3.1}}

"""
