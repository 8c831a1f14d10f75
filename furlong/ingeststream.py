"""One gRPC stream to the metrics service: batches go out, acknowledgements come in. Only a Shipper uses it.

Connecting and reading happen in a thread of the stream's own, which tells what happened and ends with the stream.
Nothing here waits for the network in the caller's thread.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from furlong import rpc
from furlong.spool import Batch
from furlong.v1 import metrics_pb2, metrics_pb2_grpc


@dataclass(frozen=True)
class Connected:
    """The service has taken the stream."""

    stream: "IngestStream"


@dataclass(frozen=True)
class Acknowledged:
    """Records are on disk there."""

    stream: "IngestStream"
    producer: str
    incarnation: int
    through_sequence: int
    num_refused: int
    first_refusal: str


@dataclass(frozen=True)
class Lost:
    """The stream is over, or never came about."""

    stream: "IngestStream"
    reason: str


Happening = Connected | Acknowledged | Lost


class IngestStream:
    """A stream that is being opened, open, or over; `tell` is called from its thread."""

    def __init__(self, address: str, tell: Callable[[Happening], None]) -> None:
        self._address, self._tell = address, tell
        self._outgoing: queue.SimpleQueue[metrics_pb2.RecordBatch | None] = queue.SimpleQueue()
        self._call: grpc.Call | None = None
        self._cancelled = False
        threading.Thread(target=self._run, name="furlong-ingest", daemon=True).start()

    def send(self, batch: Batch) -> None:
        """Hand a batch to the stream."""
        self._outgoing.put(
            metrics_pb2.RecordBatch(
                producer=batch.producer,
                incarnation=batch.incarnation,
                first_sequence=batch.first_sequence,
                records=[record.body for record in batch.records],
            )
        )

    def cancel(self) -> None:
        """End the stream now."""
        self._cancelled = True
        self._outgoing.put(None)
        if self._call is not None:
            self._call.cancel()

    def _requests(self) -> Iterator[metrics_pb2.RecordBatch]:
        while (batch := self._outgoing.get()) is not None:
            yield batch

    def _run(self) -> None:
        try:
            with rpc.channel(self._address) as channel:
                # no deadline: the stream lives as long as the process; the Shipper ends one that makes no progress
                call = metrics_pb2_grpc.MetricsStub(channel).Ingest(self._requests())
                self._call = call
                if self._cancelled:
                    call.cancel()
                call.initial_metadata()  # waits until the service has taken the stream, or refused it
                if call.is_active():
                    self._tell(Connected(self))
                for ack in call:
                    self._tell(
                        Acknowledged(
                            self,
                            ack.producer,
                            ack.incarnation,
                            ack.through_sequence,
                            ack.num_refused,
                            ack.first_refusal,
                        )
                    )
            reason = "the service ended the stream"
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else repr(error)
        except Exception as error:  # the top of the thread: an address that cannot be parsed, a closing interpreter
            reason = repr(error)
        self._outgoing.put(None)
        self._tell(Lost(self, reason))
