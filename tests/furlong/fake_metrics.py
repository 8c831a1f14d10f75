"""A metrics service that keeps what it takes in a list, and holds its producers when told to. Speaks real gRPC."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import orjson

from furlong import rpc
from furlong.v1 import metrics_pb2, metrics_pb2_grpc


class FakeMetrics(metrics_pb2_grpc.MetricsServicer):
    """Listens from the start; `close` ends it."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.batches: list[tuple[str, int, int, int]] = []
        """Producer, incarnation, first sequence and number of records of each batch taken."""
        self.holding: grpc.StatusCode | None = None
        self.num_held = 0
        """Batches sent back while holding."""
        self.num_streams = 0
        self.num_unasked = 0
        """Batches that came on a stream after the one that was sent back."""
        self._changed = threading.Condition()
        register = lambda server: metrics_pb2_grpc.add_MetricsServicer_to_server(self, server)  # noqa: E731
        self._server = rpc.start_sync_server(register, names=("furlong.v1.Metrics",), host="127.0.0.1")
        self.address = self._server.address

    def Ingest(  # type: ignore[override]  # the generated type knows no iterator
        self, request_iterator: Iterator[metrics_pb2.RecordBatch], context: grpc.ServicerContext
    ) -> Iterator[metrics_pb2.IngestAck]:
        context.send_initial_metadata(())
        self.num_streams += 1
        for batch in request_iterator:
            if self.holding is not None:
                self._hold(request_iterator)
                context.abort(self.holding, "no room on the disk")
            with self._changed:
                self.batches.append((batch.producer, batch.incarnation, batch.first_sequence, len(batch.records)))
                self.records += [orjson.loads(body) for body in batch.records if body]
                self._changed.notify_all()
            through = batch.first_sequence + len(batch.records) - 1
            yield metrics_pb2.IngestAck(
                producer=batch.producer, incarnation=batch.incarnation, through_sequence=through
            )

    def _hold(self, request_iterator: Iterator[metrics_pb2.RecordBatch]) -> None:
        with self._changed:
            self.num_held += 1
            self._changed.notify_all()
        reader = threading.Thread(target=self._count_more, args=(request_iterator,), daemon=True)
        reader.start()
        reader.join(0.05)  # time for who does not wait for an answer to send more

    def _count_more(self, request_iterator: Iterator[metrics_pb2.RecordBatch]) -> None:
        with contextlib.suppress(Exception):  # the stream is over: gRPC raises what it likes
            for _ in request_iterator:
                self.num_unasked += 1

    def Flush(self, request: metrics_pb2.FlushRequest, context: grpc.ServicerContext) -> metrics_pb2.FlushResponse:
        return metrics_pb2.FlushResponse()

    def GetStatus(
        self, request: metrics_pb2.GetMetricsStatusRequest, context: grpc.ServicerContext
    ) -> metrics_pb2.GetMetricsStatusResponse:
        return metrics_pb2.GetMetricsStatusResponse()

    def WatchAlerts(
        self, request: metrics_pb2.WatchAlertsRequest, context: grpc.ServicerContext
    ) -> Iterator[metrics_pb2.Alert]:
        return iter(())

    def said(self, event: str) -> list[dict[str, Any]]:
        """The records taken of one event."""
        return [record for record in list(self.records) if record.get("event") == event]

    def wait_for(self, condition: Callable[[], object], what: str, *, limit_s: float = 20.0) -> None:
        """Wait for what the producers do. Fails naming it."""
        with self._changed:
            assert self._changed.wait_for(condition, limit_s), f"not within {limit_s:g} s: {what}"

    def close(self) -> None:
        self._server.drain(0.0)
