"""The log lines of all services as logs of an OpenTelemetry collector: OTLP over HTTP, protobuf, gzip.

Follows the batches of records as they came in, with a cursor of its own. Each log record has a `log.record.uid` made of
its producer and its place in the durable log, by which one that was sent again can be known.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.metrics.rows import StoredBatch
from services.metrics.sinks.otlp import Sender, poster
from services.metrics.sinks.otlp_messages import Said, logs_request, read_record
from services.metrics.sinks.post import Poster
from services.metrics.sinks.sink import Cursor, Sink, SinkContext

MAX_RECORDS = 2_000
MAX_BYTES = 2 * 1024 * 1024
"""Of the records' JSON in one request."""


def make(options: Mapping[str, object], context: SinkContext) -> Sink[StoredBatch]:
    """Options: endpoint, the collector's base URL."""
    return OtlpLogsSink(poster(options, context, "v1/logs"))


@dataclass(frozen=True)
class _Numbered:
    batch_id: int
    said: Said


class OtlpLogsSink(Sink[StoredBatch]):
    """One request at a time, in order."""

    write_timeout_s = 600.0

    def __init__(self, to: Poster) -> None:
        self._sender: Sender[_Numbered] = Sender(
            to,
            encode=lambda items: logs_request([item.said for item in items]),
            id_of=lambda item: item.batch_id,
            logs=True,
        )

    async def start(self, durable: Cursor) -> Cursor:
        """Nothing is needed."""
        return durable

    async def write(self, rows: Sequence[StoredBatch]) -> Cursor:
        """Send the log records in the batches."""
        pieces = await asyncio.to_thread(_pieces, rows)
        refused = await self._sender.send(pieces)
        return Cursor(rows[-1].batch_id, refused=tuple(refused))

    async def finish(self) -> Cursor | None:
        """Everything was answered."""
        await self._sender.close()
        return None

    async def abort(self) -> None:
        """Close the connection."""
        await self._sender.close()


def _pieces(batches: Sequence[StoredBatch]) -> list[list[_Numbered]]:
    pieces: list[list[_Numbered]] = []
    size = MAX_BYTES
    for batch in batches:
        for index, body in enumerate(batch.bodies):
            uid = f"{batch.producer}/{batch.batch_id}.{index}"
            said = read_record(body, run=batch.run, uid=uid, received_us=batch.received_us)
            if said is None:
                continue
            size += len(body)
            if size > MAX_BYTES or len(pieces[-1]) >= MAX_RECORDS:
                pieces.append([])
                size = len(body)
            pieces[-1].append(_Numbered(batch.batch_id, said))
    return pieces
