"""Hands over what a run's processes left in their spools, once they have ended: to a metrics service that is shared.

The service of a run collects its spools itself; one that belongs to no run does not see the run's folder. Records keep
their numbers, so that none is taken in twice.
"""

import time
from pathlib import Path

import grpc

from furlong import rpc
from furlong.spool import Batch, Spool, left_over, waiting
from furlong.v1 import metrics_pb2, metrics_pb2_grpc

MAX_BATCH_RECORDS = 1024
MAX_BATCH_BYTES = 4 * 1024 * 1024


def hand_over(folder: Path, address: str, *, timeout_s: float) -> str:
    """Deliver the spools that nobody holds, in at most timeout_s seconds. Why some stay, for people; empty: none does.

    Never raises for a service that is away or refuses.
    """
    if not waiting(folder):
        return ""
    deadline = time.monotonic() + timeout_s
    spools = left_over(folder)
    try:
        with rpc.channel(address) as channel:
            stub = metrics_pb2_grpc.MetricsStub(channel)
            for spool in spools:
                _deliver(spool, stub, deadline)
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else repr(error)
    except (_NotAcknowledged, OSError, ValueError) as error:
        return str(error)
    finally:
        for spool in spools:
            spool.release()
    return ""


class _NotAcknowledged(Exception):
    """What comes after must not be sent: it would move the producer past what was not taken."""


def _deliver(spool: Spool, stub: metrics_pb2_grpc.MetricsStub, deadline: float) -> None:
    while batch := spool.read(max_records=MAX_BATCH_RECORDS, max_bytes=MAX_BATCH_BYTES):
        left_s = max(0.01, deadline - time.monotonic())
        acks = stub.Ingest(iter([_message(batch)]), timeout=left_s)
        if max((ack.through_sequence for ack in acks), default=0) < batch.last_sequence:
            raise _NotAcknowledged("the service ended the stream without an acknowledgement")
        spool.acknowledge(batch.last_sequence)


def _message(batch: Batch) -> metrics_pb2.RecordBatch:
    return metrics_pb2.RecordBatch(
        producer=batch.producer,
        incarnation=batch.incarnation,
        first_sequence=batch.first_sequence,
        records=[record.body for record in batch.records],
    )
