"""Hands over what a run's processes left in their spools, once they have ended: to a metrics service that is shared.

The service of a run collects its spools itself; one that belongs to no run does not see the run's folder. Records keep
their numbers, so that none is taken in twice.
"""

import time
from pathlib import Path

import grpc
import structlog

from furlong import rpc
from furlong.spool import Batch, Spool, left_over, waiting
from furlong.v1 import metrics_pb2, metrics_pb2_grpc

log = structlog.get_logger()

MAX_BATCH_RECORDS = 1024
MAX_BATCH_BYTES = 4 * 1024 * 1024


def hand_over(folder: Path, address: str, *, timeout_s: float) -> int:
    """Deliver the spools that nobody holds, in at most timeout_s seconds; how many records. What could not be
    delivered stays. Never raises for a service that is away or refuses."""
    if not waiting(folder):
        return 0
    deadline = time.monotonic() + timeout_s
    num_records = 0
    spools = left_over(folder)
    try:
        with rpc.channel(address) as channel:
            stub = metrics_pb2_grpc.MetricsStub(channel)
            for spool in spools:
                num_records += _deliver(spool, stub, deadline)
    except (grpc.RpcError, OSError, ValueError) as error:
        log.warning("spool_not_handed_over", address=address, error=str(error), num_records=num_records)
    finally:
        for spool in spools:
            spool.release()
    return num_records


def _deliver(spool: Spool, stub: metrics_pb2_grpc.MetricsStub, deadline: float) -> int:
    num_records = 0
    while batch := spool.read(max_records=MAX_BATCH_RECORDS, max_bytes=MAX_BATCH_BYTES):
        left_s = max(0.01, deadline - time.monotonic())
        for ack in stub.Ingest(iter([_message(batch)]), timeout=left_s):
            if ack.through_sequence >= batch.last_sequence:
                spool.acknowledge(batch.last_sequence)
        num_records += len(batch.records)
    return num_records


def _message(batch: Batch) -> metrics_pb2.RecordBatch:
    return metrics_pb2.RecordBatch(
        producer=batch.producer,
        incarnation=batch.incarnation,
        first_sequence=batch.first_sequence,
        records=[record.body for record in batch.records],
    )
