"""The rows as metrics of an OpenTelemetry collector: OTLP over HTTP, protobuf, gzip.

What the collector says it will never take (400, 413, 422) is halved until the rows that are to blame stand alone; those
are left out and counted. What it rejects within a success is counted and not sent again, as the protocol asks. A kill
between a request and our memory of it sends the newest rows again, with the same names, attributes and times.
"""

import asyncio
import gzip
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar
from urllib.parse import unquote

import structlog

from furlong import __version__
from furlong.config.destinations import url_problem
from services.metrics.rows import Row
from services.metrics.sinks.drawn import Drawn, drawn
from services.metrics.sinks.otlp_messages import metrics_request, num_points, rejected
from services.metrics.sinks.post import Poster, PostFailed, Unacceptable
from services.metrics.sinks.sink import Cursor, Refused, Sink, SinkContext, option_of

log = structlog.get_logger()
Item = TypeVar("Item")

HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
MAX_POINTS = 4_000
"""Of one request; a collector's limit is often 4 MiB."""
POST_LIMIT_S = 20.0


def make(options: Mapping[str, object], context: SinkContext) -> Sink[Row]:
    """Options: endpoint, the collector's base URL."""
    return OtlpMetricsSink(poster(options, context, "v1/metrics"))


class OtlpMetricsSink(Sink[Row]):
    """One request at a time, in order."""

    write_timeout_s = 600.0  # a batch may be halved many times; each request has its own limit

    def __init__(self, sender: Poster) -> None:
        self._sender = Sender(sender, encode=metrics_request, id_of=lambda row: row.row_id, logs=False)

    async def start(self, durable: Cursor) -> Cursor:
        """Nothing is needed."""
        return durable

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Send what is new in the rows."""
        shown = await asyncio.to_thread(lambda: [one for row in rows if (one := drawn(row)) is not None])
        refused = await self._sender.send(_pieces(shown))
        return Cursor(rows[-1].row_id, refused=tuple(refused))

    async def finish(self) -> Cursor | None:
        """Everything was answered."""
        await self._sender.close()
        return None

    async def abort(self) -> None:
        """Close the connection."""
        await self._sender.close()


class Sender(Generic[Item]):
    """Posts pieces of what a sink has; parts a piece that is refused."""

    def __init__(
        self,
        poster: Poster,
        *,
        encode: Callable[[Sequence[Item]], bytes],
        id_of: Callable[[Item], int],
        logs: bool,
    ) -> None:
        self._poster, self._encode, self._id_of, self._logs = poster, encode, id_of, logs
        self._took_any = False
        self.num_rejected = 0
        """Points or records that were rejected within a success."""

    async def send(self, pieces: Sequence[Sequence[Item]]) -> list[Refused]:
        """Post them all; what was refused for good. Raises PostFailed when something else is wrong."""
        refused: list[Refused] = []
        refusal: Unacceptable | None = None
        for piece in pieces:
            found, error = await self._post(piece)
            refused, refusal = refused + found, error or refusal
        if refusal is not None and not self._took_any:
            raise PostFailed(f"{refusal} (everything so far; nothing is left out before it has taken something)")
        return refused

    async def close(self) -> None:
        """Let go of the connection."""
        await self._poster.close()

    async def _post(self, items: Sequence[Item]) -> tuple[list[Refused], Unacceptable | None]:
        body = await asyncio.to_thread(lambda: gzip.compress(self._encode(items), compresslevel=1))
        headers = {
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "gzip",
            "User-Agent": f"furlong/{__version__}",
        }
        try:
            answer = await self._poster.post(body, headers)
        except Unacceptable as error:
            if len(items) == 1:
                return [Refused(self._id_of(items[0]), str(error))], error
            middle = len(items) // 2
            first, _ = await self._post(items[:middle])
            second, _ = await self._post(items[middle:])
            return first + second, error
        self._took_any = True
        self._note_rejected(answer.body, len(items))
        return [], None

    def _note_rejected(self, answer: bytes, num_items: int) -> None:
        count, reason = rejected(answer, logs=self._logs)
        self.num_rejected += count
        if count or reason:
            log.warning(
                "otlp_partly_rejected",
                count=count,
                of_items=num_items,
                total=self.num_rejected,
                reason=reason[:300],
                logs=self._logs,
            )


def poster(options: Mapping[str, object], context: SinkContext, path: str) -> Poster:
    """To a path below the endpoint, with the headers that the environment gives."""
    endpoint = option_of(options, context, "endpoint", str)
    if problem := url_problem(endpoint):
        raise context.refuse("endpoint", "[not shown]", problem)
    environment = {**os.environ, **context.environment}
    url = f"{endpoint.rstrip('/')}/{path}"
    return Poster(url, headers=headers_of(environment.get(HEADERS, "")), limit_s=POST_LIMIT_S)


def headers_of(text: str) -> dict[str, str]:
    """OpenTelemetry's own form: name=value,name=value, with the values percent-encoded. What has no name is skipped."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip() and value.strip()}


def _pieces(rows: Sequence[Drawn]) -> list[Sequence[Drawn]]:
    pieces: list[list[Drawn]] = []
    size = MAX_POINTS
    for row in rows:
        size += num_points(row)
        if size > MAX_POINTS:
            pieces.append([])
            size = num_points(row)
        pieces[-1].append(row)
    return list(pieces)
