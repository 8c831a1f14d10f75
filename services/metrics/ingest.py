"""The gRPC `Metrics` service: streams in, acknowledgements out, in order, each after its commit."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from furlong.v1 import metrics_pb2, metrics_pb2_grpc
from services.metrics.alerts.watching import AlertStreams
from services.metrics.rows import RowReader
from services.metrics.sinks.manager import SinkManager
from services.metrics.streams import IngestStream, StreamIntake
from services.metrics.tailing.part import Following
from services.metrics.writer import Writer

SERVICE_NAME = "furlong.v1.Metrics"
MAX_FLUSH_S = 60.0
MAX_BATCH_BYTES = 24 * 1024 * 1024
"""Of one message. Our own producers send 1 MiB, or one record of 4; many streams with larger ones would need more
memory than the service may have."""
SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BATCH_BYTES),
    ("grpc.http2.bdp_probe", 0),  # else each stream may buffer megabytes before it is read
]

Context = grpc.aio.ServicerContext[Any, Any]  # Any: the messages are fixed by the method


class MetricsServicer(metrics_pb2_grpc.MetricsServicer):
    """Stateless but for the streams that run."""

    def __init__(self, writer: Writer, reader: RowReader, sinks: SinkManager) -> None:
        self._writer, self._reader, self._sinks = writer, reader, sinks
        self._intake = StreamIntake(writer)
        self._streams: set[IngestStream] = set()
        self._stopping = False
        self.http = ""
        """Where the same service answers over HTTP."""
        self.alerts: AlertStreams | None = None
        """Set once they are watched."""
        self.following = Following()
        """Replaced once files are followed."""

    def register(self, server: grpc.aio.Server) -> None:
        """Serve this. Batches come as bytes: they are taken apart only when there is room for them."""
        generated = _Handlers()
        metrics_pb2_grpc.add_MetricsServicer_to_server(self, generated)  # type: ignore[arg-type]  # it is asked only twice
        handlers = generated.handlers
        handlers["Ingest"] = grpc.stream_stream_rpc_method_handler(
            self.Ingest, response_serializer=metrics_pb2.IngestAck.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
        server.add_registered_method_handlers(SERVICE_NAME, handlers)

    def stop(self) -> None:
        """End all streams once what they sent is acknowledged."""
        self._stopping = True
        for stream in self._streams:
            stream.stop()

    async def Ingest(  # type: ignore[override]  # the generated type knows only the generator form
        self, request_iterator: object, context: Context
    ) -> None:
        """Take batches until the stream or the service ends."""
        await context.send_initial_metadata(())  # the producer knows that it is taken
        stream = IngestStream(context, self._intake)
        if self._stopping:
            return
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

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

    async def WatchAlerts(  # type: ignore[override]  # the generated type knows only the generator form
        self, request: metrics_pb2.WatchAlertsRequest, context: Context
    ) -> None:
        """Alerts as they come, until the stream or the service ends."""
        if self.alerts is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "alerts are not watched yet")
            return
        await context.send_initial_metadata(self.alerts.metadata(request))
        async for alert in self.alerts.watch(request, lambda: self._stopping):
            await context.write(alert)

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
            trouble=self._writer.failing or self._writer.holding,
            counts={name: count for name, count in self._writer.counts.shown().items() if count},
            http=self.http,
            sinks=[
                metrics_pb2.SinkStatus(
                    name=sink.name,
                    state=sink.state,
                    num_rows_behind=sink.num_rows_behind,
                    last_error=sink.last_error,
                    seconds_behind=sink.seconds_behind,
                    num_rows_refused=sink.num_rows_refused,
                    num_values_left_out=sink.num_values_left_out,
                )
                for sink in await self._sinks.states()
            ],
            files=self.following.files(),
            endpoints=self.following.endpoints(),
        )


class _Handlers:
    """Takes from the generated code what it would have a server do."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}  # Any: gRPC's own handlers

    def add_registered_method_handlers(self, name: str, handlers: dict[str, Any]) -> None:
        self.handlers = dict(handlers)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same ones again."""
