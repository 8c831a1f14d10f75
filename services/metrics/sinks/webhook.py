"""The rows as JSON, by POST to a URL: {"sink": ..., "rows": [{"row": 17, "run": ..., "values": {...}}, ...]}.

Each POST has an `Idempotency-Key`, the same when the same rows are sent again. What was answered with success is not
sent again, whatever became of the rest of its write; a POST whose answer was lost is. A receiver that must not count a
row twice goes by `row`.

A body that is refused for good (400, 413, 422) is halved until the rows that are to blame stand alone; those are left
out and counted. As long as nothing was ever taken, a refusal of everything is held for a wrong URL or a wrong
configuration of the receiver, and nothing is left out.
"""

import asyncio
import dataclasses
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from furlong import __version__
from furlong.config.destinations import url_problem
from furlong.rundir import write_atomically
from services.metrics.rows import Row, RowReader
from services.metrics.sinks.post import Poster, Unacceptable
from services.metrics.sinks.sender import WRITE_TIMEOUT_S, Sender
from services.metrics.sinks.sink import Cursor, Sink, SinkContext, option_of
from services.metrics.sinks.source import MAX_ITEMS

AUTHORIZATION = "FURLONG_WEBHOOK_AUTHORIZATION"
"""The environment variable for the Authorization header."""
MAX_BODY_BYTES = 4 * 1024 * 1024
POST_LIMIT_S = 20.0


def make(options: Mapping[str, object], context: SinkContext) -> Sink[Row]:
    """Options: url."""
    url = option_of(options, context, "url", str)
    if problem := url_problem(url):
        raise context.refuse("url", "[not shown]", problem)
    authorization = context.environment.get(AUTHORIZATION) or os.environ.get(AUTHORIZATION, "")
    headers = {"Authorization": authorization} if authorization else {}
    poster = Poster(url, headers=headers, limit_s=POST_LIMIT_S)
    return WebhookSink(poster, folder=context.folder, reader=context.reader)


@dataclass(frozen=True)
class _Tried:
    """What the last POST was to bring."""

    begun: int = 0
    """The cursor before its write."""
    settled: int = 0
    """Up to this row all was answered."""
    first: int = 0
    last: int = 0


class WebhookSink(Sink[Row]):
    """Posts rows in order, one POST at a time."""

    gather_s = 1.0
    start_timeout_s = 30.0
    write_timeout_s = WRITE_TIMEOUT_S
    finish_timeout_s = 10.0

    def __init__(self, poster: Poster, *, folder: Path, reader: RowReader) -> None:
        self._poster, self._folder, self._reader = poster, folder, reader
        self._identity = ""
        self._cursor = 0
        self._sender: Sender[Row] = Sender(
            self._post, id_of=lambda row: row.row_id, cursor_at=lambda row: Cursor(row.row_id)
        )

    async def start(self, durable: Cursor) -> Cursor:
        """Rows of a try that had no answer go once more as they were, so that the key says the same."""
        tried = await asyncio.to_thread(self._prepare)
        self._cursor = durable.row_id
        if tried.begun <= self._cursor < tried.settled:  # a kill came between an answer and the cursor's way to disk
            self._cursor = tried.settled
        num_rows = min(MAX_ITEMS, tried.last - tried.first + 1)
        rows = await asyncio.to_thread(self._reader.after, self._cursor, num_rows) if tried.last else []
        if rows and (rows[0].row_id, rows[-1].row_id) == (tried.first, tried.last):
            try:
                await self._poster.post(*await asyncio.to_thread(self._request, rows))
            except Unacceptable:
                return Cursor(self._cursor)  # `write` finds out which of them it is
            self._sender.took_any = True
            self._cursor = tried.last
        return Cursor(self._cursor)

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Post them."""
        refused = await self._sender.send(_pieces(rows))
        self._cursor = rows[-1].row_id
        return Cursor(self._cursor, refused=refused)

    async def finish(self) -> Cursor | None:
        """Every row was answered."""
        await self._poster.close()
        return None

    async def abort(self) -> None:
        """Close the connections."""
        await self._poster.close()

    async def _post(self, rows: Sequence[Row]) -> None:
        """Remember what is tried, then try it."""
        settled = rows[0].row_id - 1 if self._sender.took_any else self._cursor
        tried = _Tried(self._cursor, settled, rows[0].row_id, rows[-1].row_id)

        def prepare() -> tuple[bytes, dict[str, str]]:
            _remember(self._folder / "tried", tried)
            return self._request(rows)

        await self._poster.post(*await asyncio.to_thread(prepare))

    def _prepare(self) -> _Tried:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "tried").touch()  # before what makes the folder's entries durable
        self._identity = _identity(self._folder / "identity")
        return _recall(self._folder / "tried")

    def _request(self, rows: Sequence[Row]) -> tuple[bytes, dict[str, str]]:
        """Body and headers."""
        body = b'{"sink":%s,"rows":[%s]}' % (orjson.dumps(self._identity), b",".join(map(_numbered, rows)))
        return body, {
            "Content-Type": "application/json",
            "Idempotency-Key": f"{self._identity}-{rows[0].row_id}-{rows[-1].row_id}",
            "User-Agent": f"furlong/{__version__}",
        }


def _pieces(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """Cut so that no body becomes much larger than MAX_BODY_BYTES."""
    pieces: list[list[Row]] = []
    size = MAX_BODY_BYTES
    for row in rows:
        size += len(row.body)
        if size >= MAX_BODY_BYTES:
            pieces.append([])
            size = len(row.body)
        pieces[-1].append(row)
    return list(pieces)


def _numbered(row: Row) -> bytes:
    current = b"" if row.is_current else b'"superseded":true,'
    return b'{"row":%d,%s%s' % (row.row_id, current, row.body[1:])


def _identity(path: Path) -> str:
    """Of this sink, for ever: row numbers of two services must not be taken for one another."""
    if not path.exists() or not path.read_text().strip():
        write_atomically(path, secrets.token_hex(8).encode())
    return path.read_text().strip()


def _remember(path: Path, tried: _Tried) -> None:
    """In place, so that a POST waits for one write of a few bytes: of so few a power cut leaves the old or the new."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, b"%019d %019d %019d %019d\n" % dataclasses.astuple(tried), 0)
        os.fdatasync(handle)
    finally:
        os.close(handle)


def _recall(path: Path) -> _Tried:
    try:
        begun, settled, first, last = map(int, path.read_text().split())
        return _Tried(begun, settled, first, last)
    except (OSError, ValueError):  # nothing yet, or damaged: at most a key is another one
        return _Tried()
