"""The log lines of all services as logs of an OpenTelemetry collector: OTLP over HTTP, protobuf, gzip.

Follows the batches of records as they came in, with a cursor of its own. Each log record has a `log.record.uid` made of
its producer and its place in the durable log, by which one that was sent again can be known.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from furlong.asking.store import RECORD_BITS
from services.metrics.rows import StoredBatch
from services.metrics.sinks.otlp import Collector, poster
from services.metrics.sinks.otlp_messages import Said, logs_request, read_record
from services.metrics.sinks.post import Poster
from services.metrics.sinks.sender import WRITE_TIMEOUT_S, Sender
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
    cursor: Cursor
    """Once it and all before it were taken."""
    said: Said


class OtlpLogsSink(Sink[StoredBatch]):
    """One request at a time, in order. A cursor's position is the last record taken of the batch behind its own."""

    write_timeout_s = WRITE_TIMEOUT_S

    def __init__(self, to: Poster) -> None:
        self._collector: Collector[_Numbered] = Collector(
            to,
            encode=lambda items: logs_request([item.said for item in items]),
            logs=True,
            on_rejected=self._leave_out,
        )
        self._sender: Sender[_Numbered] = Sender(
            self._collector.post, id_of=lambda item: item.batch_id, cursor_at=lambda item: item.cursor
        )
        self._taken = Cursor(0)

    async def start(self, durable: Cursor) -> Cursor:
        """Nothing is needed."""
        self._taken = durable
        return durable

    async def write(self, rows: Sequence[StoredBatch]) -> Cursor:
        """Send the log records in the batches."""
        pieces = await asyncio.to_thread(_pieces, rows, self._taken)
        refused = await self._sender.send(pieces)
        self._taken = Cursor(rows[-1].batch_id)
        return Cursor(rows[-1].batch_id, refused=refused)

    async def finish(self) -> Cursor | None:
        """Everything was answered."""
        await self._collector.close()
        return None

    async def abort(self) -> None:
        """Close the connection."""
        await self._collector.close()

    def _leave_out(self, count: int) -> None:
        self.num_left_out += count


def _pieces(batches: Sequence[StoredBatch], taken: Cursor) -> list[list[_Numbered]]:
    """taken: what is before it is left out."""
    pieces: list[list[_Numbered]] = []
    size, before_id = MAX_BYTES, taken.row_id
    for batch in batches:
        for index, body in enumerate(batch.bodies):
            record_id = (batch.batch_id << RECORD_BITS) + index
            uid = f"{batch.producer}/{batch.batch_id}.{index}"
            said = read_record(body, run=batch.run, uid=uid, received_us=batch.received_us)
            if said is None or record_id <= taken.position:
                continue
            size += len(body)
            if size > MAX_BYTES or len(pieces[-1]) >= MAX_RECORDS:
                pieces.append([])
                size = len(body)
            pieces[-1].append(_Numbered(batch.batch_id, Cursor(before_id, record_id), said))
        before_id = batch.batch_id
    return pieces
