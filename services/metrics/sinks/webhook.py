"""The rows as JSON, by POST to a URL: {"sink": ..., "rows": [{"row": 17, "run": ..., "values": {...}}, ...]}.

Each POST has an `Idempotency-Key`, the same when the same rows are sent again. What was answered with success is not
sent again; a POST whose answer was lost is. A receiver that must not count a row twice goes by `row`.

A body that is refused for good (400, 413, 422) is halved until the rows that are to blame stand alone; those are left
out and counted. As long as nothing was ever taken, a refusal of everything is held for a wrong URL or a wrong
configuration of the receiver, and nothing is left out.
"""

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from furlong import __version__
from furlong.config.destinations import url_problem
from furlong.rundir import write_atomically
from services.metrics.rows import Row, RowReader
from services.metrics.sinks.post import Poster, PostFailed, Unacceptable
from services.metrics.sinks.sink import Cursor, Refused, Sink, SinkContext, option_of

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


class WebhookSink(Sink[Row]):
    """Posts rows in order, one POST at a time."""

    start_timeout_s = 30.0
    write_timeout_s = 600.0  # a batch may be halved many times; each POST has its own limit
    finish_timeout_s = 10.0

    def __init__(self, poster: Poster, *, folder: Path, reader: RowReader) -> None:
        self._poster, self._folder, self._reader = poster, folder, reader
        self._identity = ""
        self._tried = (0, 0)
        self._took_any = False
        self._refused: list[Refused] = []

    async def start(self, durable: Cursor) -> Cursor:
        """Rows of a try that had no answer go once more as they were, so that the key says the same."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._identity = _identity(self._folder / "identity")
        self._tried = _read_span(self._folder / "tried")
        first, last = self._tried
        rows = await asyncio.to_thread(self._reader.after, durable.row_id, last - first + 1) if last else []
        if not rows or (rows[0].row_id, rows[-1].row_id) != self._tried:
            return durable
        try:
            await self._poster.post(*self._request(rows))
        except Unacceptable:
            return durable  # `write` finds out which of them it is
        self._took_any = True
        return Cursor(last)

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Post them."""
        self._refused = []
        refusal: Unacceptable | None = None
        for piece in _pieces(rows):
            self._tried = (piece[0].row_id, piece[-1].row_id)
            write_atomically(self._folder / "tried", b"%d %d" % self._tried)
            refusal = await self._post(piece) or refusal
        if refusal is not None and not self._took_any:
            self._tried = (0, 0)
            raise PostFailed(f"{refusal} (every row so far; nothing is left out before it has taken one)")
        return Cursor(rows[-1].row_id, refused=tuple(self._refused))

    async def finish(self) -> Cursor | None:
        """Every row was answered."""
        await self._poster.close()
        return None

    async def abort(self) -> None:
        """Close the connections."""
        await self._poster.close()

    async def _post(self, rows: Sequence[Row]) -> Unacceptable | None:
        """Halve what is refused; one row alone is left out. The refusal, if there was one."""
        try:
            await self._poster.post(*self._request(rows))
        except Unacceptable as error:
            if len(rows) == 1:
                self._refused.append(Refused(rows[0].row_id, str(error)))
            else:
                middle = len(rows) // 2
                await self._post(rows[:middle])
                await self._post(rows[middle:])
            return error
        self._took_any = True
        return None

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


def _read_span(path: Path) -> tuple[int, int]:
    try:
        first, last = path.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 0, 0
