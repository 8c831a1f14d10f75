"""GET /api/live: records, rows and alerts as they come, as server-sent events; from a place in the store if asked.

An event's id is a place: the ids of the newest record, row and alert up to it. A client that comes back with it (the
header Last-Event-ID) is shown everything since, from the store, and then what comes, each once.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from sse_starlette import EventSourceResponse

from furlong.asking.filters import LogFilter
from furlong.asking.following import KINDS, Event, Follower, Place, Wanted, place_now
from services.metrics.feed import Feed, Item, TooManyListeners
from services.metrics.http.asking import Asker, Axis, Level, Run, level_of, refuse_unknown
from services.metrics.http.errors import Problem
from services.metrics.queries import Queries
from services.metrics.rows import Row, StoredBatch

PING_S = 15
SEND_BYTES = 64 * 1024
SEND_TIMEOUT_S = 300.0
OFF_LOOP_RECORDS = 200
"""More are looked at on a thread: one for all clients, so that many leave the processor and the pool to others."""
_beside = ThreadPoolExecutor(1, thread_name_prefix="live")


class Stream:
    """One client's events."""

    def __init__(self, asker: Asker, feed: Feed, wanted: Wanted, place: Place | None) -> None:
        self._asker, self._feed, self._asked = asker, feed, place
        self._follower = Follower(wanted, place or Place())
        self._listener = feed.listen()

    async def events(self) -> AsyncGenerator[bytes]:
        """Until the client goes or the service stops."""
        try:
            now = await self._asker.ask(place_now)
            follower = self._follower
            if self._asked is None:
                follower.place = now
            elif self._asked.record_id > now.record_id or self._asked.row_id > now.row_id:
                follower.place = now
                yield _told("reset", now, {"reason": "the store is another one: what was before is not shown"})
            yield _told("hello", follower.place, {"place": str(follower.place)})
            async for chunk in self._replay():
                yield chunk
            while not self._listener.closed:
                num_lost, items = await self._listener.next(PING_S)
                if num_lost:
                    yield _told("gap", None, {"num_lost": num_lost, "place": str(follower.place)})
                for chunk in await self._wanted_of(items):
                    yield chunk
        finally:
            self._feed.leave(self._listener)

    async def _replay(self) -> AsyncGenerator[bytes]:
        """From the store, up to where the queue goes on. What is queued meanwhile is in the store too, and dropped."""
        has_more = True
        while has_more and not self._listener.closed:
            self._listener.drop_all()
            has_more, events = await self._asker.ask(partial(Follower.next_of, self._follower))
            for chunk in _chunks(events):
                yield chunk

    async def _wanted_of(self, items: list[Item]) -> list[bytes]:
        if sum(len(item.bodies) if isinstance(item, StoredBatch) else 1 for item in items) > OFF_LOOP_RECORDS:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_beside, lambda: list(_chunks(self._events_of(items))))
        return list(_chunks(self._events_of(items)))

    def _events_of(self, items: Iterable[Item]) -> Iterator[Event]:
        follower = self._follower
        for item in items:
            if isinstance(item, StoredBatch):
                yield from follower.batch(
                    batch_id=item.batch_id,
                    run=item.run,
                    received_us=item.received_us,
                    top_level=item.top_level,
                    bodies=item.bodies,
                )
            elif isinstance(item, Row):
                yield from follower.row(row_id=item.row_id, run=item.run, emitted_us=item.emitted_us, body=item.body)
            else:
                yield from follower.alert(alert_id=item.alert_id, run=item.run, body=item.body)


def router(queries: Queries, feed: Feed) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["live"], dependencies=[Depends(refuse_unknown)])
    asker = Asker(queries)

    @routes.get("/api/place", summary="The end of what is stored")
    async def place() -> dict[str, str]:
        """To follow from here on, send it as Last-Event-ID to /api/live."""
        return {"place": str(await asker.ask(place_now))}

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
        wanted = Wanted(LogFilter(run, service, instance, level_of(level), rollout_id, text), chosen, axis)
        seen = _place_of(request.headers.get("last-event-id") or place)
        try:
            stream = Stream(asker, feed, wanted, seen)
        except TooManyListeners:
            raise Problem(503, "too many clients listen", "Come back later.", retry_after_s=30) from None
        return EventSourceResponse(stream.events(), ping=PING_S, sep="\n", send_timeout=SEND_TIMEOUT_S)

    return routes


def _place_of(text: str | None) -> Place | None:
    try:
        return Place.parse(text) if text else None
    except ValueError as error:
        raise Problem(400, str(error), "Send an event's id, or none.") from None


def _chunks(events: Iterable[Event]) -> Iterator[bytes]:
    """The events in pieces that are worth sending."""
    waiting, size = [], 0
    for event in events:
        waiting.append(_raw(event.kind, event.place, event.data))
        size += len(event.data)
        if size >= SEND_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _told(name: str, place: Place | None, tree: object) -> bytes:
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
