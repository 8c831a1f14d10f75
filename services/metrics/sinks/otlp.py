"""The rows as metrics of an OpenTelemetry collector: OTLP over HTTP, protobuf, gzip.

What the collector says it will never take (400, 413, 422) is halved until the rows that are to blame stand alone; those
are left out and counted. What it rejects within a success is counted and not sent again, as the protocol asks. What it
took of a write before it failed is not sent again either. A kill between a request and our memory of it sends the
newest rows again, with the same names, attributes and times.
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
from services.metrics.sinks.post import Poster
from services.metrics.sinks.sender import WRITE_TIMEOUT_S, Sender
from services.metrics.sinks.sink import Cursor, Sink, SinkContext, option_of

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

    write_timeout_s = WRITE_TIMEOUT_S

    def __init__(self, to: Poster) -> None:
        self._collector = Collector(to, encode=metrics_request, logs=False, on_rejected=self._leave_out)
        self._sender: Sender[Drawn] = Sender(
            self._collector.post, id_of=lambda row: row.row_id, cursor_at=lambda row: Cursor(row.row_id)
        )

    async def start(self, durable: Cursor) -> Cursor:
        """Nothing is needed."""
        return durable

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Send what is new in the rows."""
        shown = await asyncio.to_thread(lambda: [one for row in rows if (one := drawn(row)) is not None])
        return Cursor(rows[-1].row_id, refused=await self._sender.send(_pieces(shown)))

    async def finish(self) -> Cursor | None:
        """Everything was answered."""
        await self._collector.close()
        return None

    async def abort(self) -> None:
        """Close the connection."""
        await self._collector.close()

    def _leave_out(self, count: int) -> None:
        self.num_left_out += count


class Collector(Generic[Item]):
    """Takes points or log records by POST."""

    def __init__(
        self,
        poster: Poster,
        *,
        encode: Callable[[Sequence[Item]], bytes],
        logs: bool,
        on_rejected: Callable[[int], None],
    ) -> None:
        """on_rejected: told how many points or records were rejected within a success."""
        self._poster, self._encode, self._logs = poster, encode, logs
        self._on_rejected = on_rejected

    async def post(self, items: Sequence[Item]) -> None:
        """One request. Raises as Poster does."""
        body = await asyncio.to_thread(lambda: gzip.compress(self._encode(items), compresslevel=1))
        headers = {
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "gzip",
            "User-Agent": f"furlong/{__version__}",
        }
        answer = await self._poster.post(body, headers)
        self._note_rejected(answer.body, len(items))

    async def close(self) -> None:
        """Let go of the connection."""
        await self._poster.close()

    def _note_rejected(self, answer: bytes, num_items: int) -> None:
        count, reason = rejected(answer, logs=self._logs)
        self._on_rejected(count)
        if count or reason:
            log.warning(
                "otlp_partly_rejected",
                count=count,
                of_items=num_items,
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
