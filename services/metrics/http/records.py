"""POST /v1/records: takes records from log shippers, curl and whoever else; answers when they are on disk.

A sender that names itself, its incarnation and the number of the first record may send a post again: what is there is
skipped. Without these each post is new. Never holds more of a body than a few batches.
"""

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from services.metrics.http.body import Packed, pieces
from services.metrics.http.errors import Problem
from services.metrics.http.splitting import MAX_RECORD_BYTES, Item, Record, Refusal, Splitter
from services.metrics.intake import RecordsIn, Taken
from services.metrics.mildjson import line_of
from services.metrics.writer import Sending, StoreFailed, StoreFull, Writer

MAX_BATCH_RECORDS = 4096
MAX_BATCH_BYTES = 4 * 1024 * 1024
MAX_PENDING = 4
"""Batches of one post that may wait for their commit."""
MAX_POSTS = 1024
MAX_HELD_BYTES = 64 * 1024 * 1024
"""What all posts together may hold of records that are not whole or not on disk."""
MAX_PACKED_BYTES = 256 * 1024 * 1024
"""What all posts together may have in temporary files: packed bodies that have not ended."""
MAX_HELD_OF_ONE = 256 * 1024
"""When they hold more: a post that holds no more than so much goes on, others come again later."""
MAX_AT_WORK = 8
"""Pieces that are cut at once, over all posts."""
MAX_REFUSALS_TOLD = 100
MAX_NOTICED_TOLD = 100
COMMIT_S = 30.0
RETRY_S = 2
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RUN_RULE = "run must be 1 to 128 letters, digits, dots, dashes and underscores, the first a letter or digit"
_CLIENT = re.compile(r"[\x21-\x7e]{1,200}")
_REFUSED = b"null"
"""Stands for a record that was refused, so that the others keep their numbers."""


@dataclass
class Sender:
    """Who posts, and how its next records are numbered. 0: by the store, in the order in which they come."""

    producer: str
    incarnation: int
    next_sequence: int


@dataclass
class Answer:
    """What became of a post so far."""

    num_records: int = 0
    taken: int = 0
    skipped_known: int = 0
    num_refused: int = 0
    refused: list[dict[str, object]] = field(default_factory=list)
    num_noticed: int = 0
    noticed: list[dict[str, object]] = field(default_factory=list)

    def refuse(self, index: int, reason: str) -> None:
        """Count one, and tell it if there is room."""
        self.num_refused += 1
        if len(self.refused) < MAX_REFUSALS_TOLD:
            self.refused.append({"index": index, "reason": reason})

    def notice(self, taken: Taken, first_index: int) -> None:
        """Records that were taken, but make no row, or only a part of theirs."""
        self.num_noticed += taken.num_noticed
        for index, reason in taken.noticed[: MAX_NOTICED_TOLD - len(self.noticed)]:
            self.noticed.append({"index": first_index + index, "reason": reason})

    def as_json(self) -> dict[str, object]:
        """For the sender."""
        return {
            "taken": self.taken,
            "skipped_known": self.skipped_known,
            "num_refused": self.num_refused,
            "refused": self.refused,
            "num_noticed": self.num_noticed,
            "noticed": self.noticed,
        }


class RecordsIntake:
    """Holds the posts that are under way."""

    def __init__(self, writer: Writer, is_ready: Callable[[], bool]) -> None:
        self._writer, self._is_ready = writer, is_ready
        self._at_work = asyncio.Semaphore(MAX_AT_WORK)
        self._posts: set[_Post] = set()

    async def take(self, request: Request, *, run: str | None) -> JSONResponse:
        """One post, from its first byte to the disk. Raises Problem."""
        # a full disk is told by the writer, which alone sees when it has room again
        if not self._is_ready():
            raise Problem(503, "the service starts or stops", "Send it again later.", retry_after_s=RETRY_S)
        if len(self._posts) >= MAX_POSTS:
            raise Problem(429, f"{MAX_POSTS} posts are under way", "Send it again later.", retry_after_s=RETRY_S)
        default_run = run or request.headers.get("x-furlong-run") or "default"
        if not _RUN.fullmatch(default_run):
            raise Problem(400, f"{RUN_RULE}, got {default_run[:200]!r}", "Change ?run= or the header X-Furlong-Run.")
        post = _Post(self._writer, self._sender(request), default_run, self._at_work)
        self._posts.add(post)
        try:
            return await self._receive(request, post)
        finally:
            self._posts.discard(post)

    async def _receive(self, request: Request, post: "_Post") -> JSONResponse:
        try:
            async with contextlib.aclosing(pieces(request, post.packed)) as unpacked:
                async for piece in unpacked:
                    if piece:
                        await post.feed(piece)
                    else:
                        self._bound_packed(post)
                    await self._bound(post)
            await post.finish()
        except ClientDisconnect:
            return JSONResponse({}, 400)  # nobody reads it
        except StoreFailed as error:
            raise (_held if isinstance(error, StoreFull) else _not_written)(str(error), post.answer) from None
        except Problem as problem:
            problem.more.update(post.answer.as_json() if post.answer.taken else {})
            raise
        answer = post.answer
        if answer.num_refused and not answer.taken and not answer.skipped_known:
            remedy = "A record is a JSON object: one on each line, or an array of them."
            first = str(answer.refused[0]["reason"])
            raise Problem(400, f"no record could be taken: {first}", remedy, more=answer.as_json())
        return JSONResponse(answer.as_json())

    async def _bound(self, post: "_Post") -> None:
        """Have a post give up what it holds while all hold too much. Raises Problem when it cannot."""
        if self._held_bytes() <= MAX_HELD_BYTES:
            return
        await post.drain()
        if post.held_bytes > MAX_HELD_OF_ONE and self._held_bytes() > MAX_HELD_BYTES:
            raise Problem(429, "too many large records are half here", "Send it again later.", retry_after_s=RETRY_S)

    def _bound_packed(self, post: "_Post") -> None:
        """Raises Problem when temporary files hold too much: of those that are still coming, this one is refused."""
        if post.packed.disk_bytes and sum(one.packed.disk_bytes for one in self._posts) > MAX_PACKED_BYTES:
            raise Problem(429, "too many packed bodies are half here", "Send it again later.", retry_after_s=RETRY_S)

    def _held_bytes(self) -> int:
        return sum(post.held_bytes for post in self._posts)

    def _sender(self, request: Request) -> Sender:
        headers = request.headers
        client = headers.get("x-furlong-producer") or (request.client.host if request.client else "unknown")
        if not _CLIENT.fullmatch(client):
            raise Problem(400, "X-Furlong-Producer must be 1 to 200 visible ASCII characters", "Give another name.")
        producer = f"http/{client}"
        names = ("x-furlong-producer", "x-furlong-incarnation", "x-furlong-sequence")
        given = [name for name in names[1:] if name in headers]
        if given:
            if missing := [name for name in names if name not in headers]:
                raise Problem(400, f"{given[0]} has no meaning without {', '.join(missing)}", "Give all three.")
            return Sender(producer, _number(request, names[1]), _number(request, names[2]))
        # one incarnation for ever: what it says of a row after a restart of ours adds to what it said before
        return Sender(f"{producer} unnumbered", 1, 0)  # with a space: no sender can take this name


class _Post:
    """One body on its way to the disk."""

    def __init__(self, writer: Writer, sender: Sender, run: str, at_work: asyncio.Semaphore) -> None:
        self.sender, self.answer, self.packed = sender, Answer(), Packed()
        self._writer, self._run, self._at_work = writer, run, at_work
        self._splitter, self._sending = Splitter(), Sending()
        self._bodies: list[bytes] = []
        self._size_bytes = 0
        self._num_submitted = 0
        self._pending: deque[_Pending] = deque()

    async def feed(self, piece: bytes) -> None:
        """Take what is whole. Raises StoreFailed, Problem."""
        async with self._at_work:
            cut = asyncio.to_thread(self._cut, piece) if len(piece) > 32 * 1024 else None
            for body in await cut if cut is not None else self._cut(piece):
                self._bodies.append(body)
                self._size_bytes += len(body)
                if len(self._bodies) >= MAX_BATCH_RECORDS or self._size_bytes >= MAX_BATCH_BYTES:
                    await self._submit()

    async def finish(self) -> None:
        """Take what is left, and wait for the disk. Raises StoreFailed, Problem."""
        self._bodies += self._read(self._splitter.finish())
        await self.drain()

    @property
    def held_bytes(self) -> int:
        """In memory: of what is not whole, and of what is not on disk."""
        pending = sum(batch.size_bytes for batch in self._pending)
        return self.packed.memory_bytes + self._splitter.held_bytes + self._size_bytes + pending

    async def drain(self) -> None:
        """Have all that is whole on disk. Raises StoreFailed, Problem."""
        await self._submit()
        while self._pending:
            await self._await_oldest()

    def _cut(self, piece: bytes) -> list[bytes]:
        return self._read(self._splitter.feed(piece))

    def _read(self, items: list[Item]) -> list[bytes]:
        """The bodies to store, in order, with something in the place of those that are refused."""
        bodies = []
        for item in items:
            item = _with_run(item, self._run)
            if isinstance(item, Refusal):
                self.answer.refuse(self.answer.num_records, item.reason)
            self.answer.num_records += 1
            bodies.append(item.body if isinstance(item, Record) else _REFUSED)
        return bodies

    async def _submit(self) -> None:
        if not self._bodies:
            return
        sender, bodies = self.sender, tuple(self._bodies)
        batch = RecordsIn(sender.producer, sender.incarnation, sender.next_sequence, bodies)
        sender.next_sequence += len(bodies) if sender.next_sequence else 0
        done = asyncio.wrap_future(self._writer.submit(batch, self._sending))
        self._pending.append(_Pending(bodies, self._num_submitted, self._size_bytes, done))
        self._num_submitted += len(bodies)
        self._bodies, self._size_bytes = [], 0
        if len(self._pending) > MAX_PENDING:
            await self._await_oldest()

    async def _await_oldest(self) -> None:
        batch = self._pending.popleft()
        try:
            taken = await asyncio.wait_for(asyncio.shield(batch.done), COMMIT_S)
        except TimeoutError:
            raise _not_written(f"it took longer than {COMMIT_S:g} s", self.answer) from None
        num_known = taken.num_known
        known, new = batch.bodies[:num_known], batch.bodies[num_known:]
        num_ours = new.count(_REFUSED)
        self.answer.skipped_known += num_known - known.count(_REFUSED)
        self.answer.taken += len(new) - max(num_ours, taken.num_refused)
        for _ in range(taken.num_refused - num_ours):  # the writer knows rules of its own
            self.answer.refuse(batch.first_index, taken.first_refusal)
        self.answer.notice(taken, batch.first_index)


@dataclass(frozen=True)
class _Pending:
    """A batch that waits for its commit."""

    bodies: tuple[bytes, ...]
    first_index: int
    size_bytes: int
    done: "asyncio.Future[Taken]"


def _with_run(item: Item, run: str) -> Item:
    """The record with its run; one whose run is no run's name is refused."""
    if isinstance(item, Refusal):
        return item
    given = item.fields.get("run")
    if given is None:
        if "run" in item.fields:
            return _fitting(line_of({**item.fields, "run": run}), item.fields)
        head = b'{"run":' + orjson.dumps(run)
        return _fitting(head + (b"," + item.body[1:] if item.fields else b"}"), item.fields)
    if not isinstance(given, str) or not _RUN.fullmatch(given):
        return Refusal(f"{RUN_RULE}, got {given!r:.200}")
    return item


def _fitting(body: bytes, fields: dict[str, object]) -> Item:
    if len(body) > MAX_RECORD_BYTES:
        return Refusal(f"a record has at most {MAX_RECORD_BYTES} bytes, got {len(body)}")
    return Record(body, fields)


def _number(request: Request, name: str) -> int:
    text = request.headers[name]
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise Problem(400, f"{name} must be a whole number from 1 of at most 18 digits, got {text[:100]!r}", "Mend it.")
    return int(text)


def _held(reason: str, answer: Answer) -> Problem:
    more = answer.as_json() if answer.taken else {}
    return Problem(429, f"no records are taken now: {reason}", "Send it again later.", retry_after_s=10, more=more)


def _not_written(reason: str, answer: Answer) -> Problem:
    remedy = "Send it again; producers that number their records never double one."
    more = answer.as_json() if answer.taken else {}
    return Problem(503, f"the store cannot be written: {reason}", remedy, retry_after_s=RETRY_S, more=more)


_EXAMPLE = '{"level": "info", "event": "epoch_done", "run": "mine", "service": "trainer", "epoch": 3}\n'
_NUMBERS = '{"event": "metrics", "run": "mine", "axis": "train/step", "step": 7, "values": {"train/loss": 0.25}}\n'
_OPENAPI: dict[str, Any] = {  # Any: OpenAPI's own tree
    "requestBody": {
        "required": True,
        "description": "Newline-delimited JSON, or a JSON array; read by its content. gzip and deflate are taken.",
        "content": {
            "application/x-ndjson": {"schema": {"type": "string"}, "example": _EXAMPLE + _NUMBERS},
            "application/json": {
                "schema": {"type": "array", "items": {"type": "object"}},
                "example": [json.loads(_EXAMPLE), json.loads(_NUMBERS)],
            },
        },
    }
}


def router(writer: Writer, is_ready: Callable[[], bool]) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["taking in"])
    intake = RecordsIntake(writer, is_ready)

    @routes.post(
        "/v1/records",
        summary="Take records in",
        openapi_extra=_OPENAPI,
        responses={
            200: {"content": {"application/json": {"example": {**Answer(taken=2).as_json()}}}},
            400: {"description": "No record could be taken."},
            413: {"description": "Larger than 64 MiB, or than 256 MiB once unpacked."},
            415: {"description": "An encoding that is not taken."},
            429: {"description": "The store holds producers back: send again after Retry-After."},
            503: {"description": "The store cannot be written: send again after Retry-After."},
        },
    )
    async def records(
        request: Request,
        run: Annotated[str | None, Query(description="The run of records that name none.", examples=["mine"])] = None,
    ) -> JSONResponse:
        """Each record is a JSON object. `run` names its run; one without gets `?run=`, the header X-Furlong-Run, or
        "default". The answer comes when they are on disk, and says how many were taken, which were refused and why, and
        which metrics records were taken but make no row, or not with all their values (`noticed`).

        With the headers X-Furlong-Producer (a name), X-Furlong-Incarnation (a number that grows with each start of
        the sender, such as its start time) and X-Furlong-Sequence (the number of the first record, counted from 1), a
        post that is sent again doubles nothing.
        """
        return await intake.take(request, run=run)

    return routes
