"""The gRPC `Metrics` service: streams in, acknowledgements out, in order, each after its commit."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import structlog

from furlong.v1 import metrics_pb2, metrics_pb2_grpc
from services.metrics.intake import RecordsIn, Taken
from services.metrics.rows import RowReader
from services.metrics.sinks.manager import SinkManager
from services.metrics.writer import StoreFailed, Writer

log = structlog.get_logger()

WINDOW_BATCHES = 16
"""Batches of one stream that may wait for their commit."""
MAX_WAITING_BYTES = 16 * 1024 * 1024
"""Bytes of all streams that may wait; then no more is read, and producers wait in turn."""
MAX_FLUSH_S = 60.0
_MAX_INTEGER = 2**63 - 1

Context = grpc.aio.ServicerContext[Any, Any]  # Any: the messages are fixed by the method


class MetricsServicer(metrics_pb2_grpc.MetricsServicer):
    """Stateless but for the streams that run."""

    def __init__(self, writer: Writer, reader: RowReader, sinks: SinkManager) -> None:
        self._writer, self._reader, self._sinks = writer, reader, sinks
        self._stopping = asyncio.Event()
        self._room = _Room(MAX_WAITING_BYTES)
        self._last_warned = ""

    def stop(self) -> None:
        """End all streams once what they sent is acknowledged."""
        self._stopping.set()

    async def Ingest(  # type: ignore[override]  # the generated type knows only the generator form
        self, request_iterator: object, context: Context
    ) -> None:
        """Take batches until the stream or the service ends."""
        await context.send_initial_metadata(())  # the producer knows that it is taken
        waiting: asyncio.Queue[_Waiting | None] = asyncio.Queue(WINDOW_BATCHES)
        reading = asyncio.create_task(self._read(context, waiting))
        try:
            while (item := await waiting.get()) is not None:
                await self._acknowledge(item, context)
            await reading
        finally:
            reading.cancel()
            while not waiting.empty():
                self._release(waiting.get_nowait())

    async def Flush(self, request: metrics_pb2.FlushRequest, context: Context) -> metrics_pb2.FlushResponse:
        """Wait until every sink has every row of what is acknowledged."""
        left_s = context.time_remaining()
        limit_s = min(MAX_FLUSH_S, left_s - 0.1 if left_s is not None else MAX_FLUSH_S)
        await asyncio.wrap_future(self._writer.barrier())
        last = await asyncio.to_thread(self._reader.last_row_id)
        lagging = await self._sinks.wait_handed(limit_s)
        if lagging:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"sinks that lag: {', '.join(lagging)}")
        return metrics_pb2.FlushResponse(num_rows=last)

    async def GetStatus(
        self, request: metrics_pb2.GetMetricsStatusRequest, context: Context
    ) -> metrics_pb2.GetMetricsStatusResponse:
        """What the service holds."""
        return await self.status()

    async def status(self) -> metrics_pb2.GetMetricsStatusResponse:
        """The same, for who is in the process."""
        last = await asyncio.to_thread(self._reader.last_row_id)
        return metrics_pb2.GetMetricsStatusResponse(
            num_records=await asyncio.to_thread(self._reader.num_records),
            num_rows=last,
            num_refused=self._writer.counts.num_refused,
            sinks=[
                metrics_pb2.SinkStatus(
                    name=sink.name,
                    state=sink.state,
                    num_rows_behind=sink.num_rows_behind,
                    last_error=sink.last_error,
                    seconds_behind=sink.seconds_behind,
                    num_rows_refused=sink.num_rows_refused,
                )
                for sink in await self._sinks.states()
            ],
        )

    async def _read(self, context: Context, waiting: "asyncio.Queue[_Waiting | None]") -> None:
        try:
            while True:
                batch = await self._unless_stopping(context.read)
                if batch is None or batch is grpc.aio.EOF:
                    return
                problem = _problem(batch)
                if problem:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
                item = await self._submit(batch)
                try:
                    await waiting.put(item)
                except asyncio.CancelledError:
                    self._release(item)
                    raise
        finally:
            await waiting.put(None)

    async def _submit(self, batch: metrics_pb2.RecordBatch) -> "_Waiting":
        taken = RecordsIn(batch.producer, batch.incarnation, batch.first_sequence, tuple(batch.records))
        size = sum(map(len, taken.bodies))
        await self._room.take(size)
        return _Waiting(taken, size, asyncio.wrap_future(self._writer.submit(taken)))

    async def _acknowledge(self, item: "_Waiting", context: Context) -> None:
        try:
            taken = await item.done
        except StoreFailed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the store cannot be written: {error}")
            return
        finally:
            self._release(item)
        if taken is None:
            return
        if taken.num_refused and taken.first_refusal != self._last_warned:
            self._last_warned = taken.first_refusal
            log.warning(
                "records_refused",
                producer=item.batch.producer,
                num_refused=taken.num_refused,
                reason=taken.first_refusal,
            )
        await context.write(
            metrics_pb2.IngestAck(
                producer=item.batch.producer,
                incarnation=item.batch.incarnation,
                through_sequence=taken.through_sequence,
                num_refused=taken.num_refused,
                first_refusal=taken.first_refusal,
            )
        )

    def _release(self, item: "_Waiting | None") -> None:
        if item is not None:
            self._room.give_back(item.size_bytes)

    async def _unless_stopping(self, read: Callable[[], Coroutine[Any, Any, Any]]) -> Any:  # Any: gRPC's EOF or a batch
        reading = asyncio.ensure_future(read())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            stopping.cancel()


class _Waiting:
    """A batch on its way to the disk."""

    def __init__(self, batch: RecordsIn, size_bytes: int, done: "asyncio.Future[Taken | None]") -> None:
        self.batch, self.size_bytes, self.done = batch, size_bytes, done


class _Room:
    """Bytes that may be held. One that is larger than all the room gets it when it is alone."""

    def __init__(self, size_bytes: int) -> None:
        self._size, self._used = size_bytes, 0
        self._changed = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        while self._used and self._used + size_bytes > self._size:
            self._changed.clear()
            await self._changed.wait()
        self._used += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self._used -= size_bytes
        self._changed.set()


def _problem(batch: metrics_pb2.RecordBatch) -> str:
    """Why a batch cannot be taken at all. Empty: it can."""
    if not batch.producer or len(batch.producer) > 512:
        return f"producer must have 1 to 512 characters, got {len(batch.producer)}"
    if not 1 <= batch.incarnation <= _MAX_INTEGER:
        return f"incarnation must be 1 to {_MAX_INTEGER}, got {batch.incarnation}"
    if not 1 <= batch.first_sequence <= _MAX_INTEGER - len(batch.records):
        return f"first_sequence must be 1 to {_MAX_INTEGER}, got {batch.first_sequence}"
    return ""
