"""Producers for the ingest benchmark: many gRPC streams from one process; each acknowledgement is timed."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

import grpc.aio
import orjson

from furlong import rpc
from furlong.v1 import metrics_pb2

WINDOW_BATCHES = 8
"""In flight a producer."""
_METHOD = "/furlong.v1.Metrics/Ingest"


@dataclass
class Taken:
    """What a load came to."""

    num_records: int = 0
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)

    def percentile_ms(self, share: float) -> float:
        """Of the acknowledgements."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 if ordered else 0.0


def record(number: int, size_bytes: int) -> bytes:
    """A log line of exactly so many bytes."""
    line = orjson.dumps(
        {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime()),
            "level": "info",
            "event": "weights_published",
            "run": "bench",
            "service": "trainer",
            "instance": "trainer-0",
            "rank": 0,
            "number": number,
            "text": "",
        }
    )
    return line[:-2] + b"y" * (size_bytes - len(line)) + line[-2:]


def run_load(address: str, *, num_producers: int, batch_size: int, num_records: int, size_bytes: int = 300) -> Taken:
    """Send so many records in all and wait until each is acknowledged."""
    return asyncio.run(_run(address, num_producers, batch_size, num_records, size_bytes))


async def _run(address: str, num_producers: int, batch_size: int, num_records: int, size_bytes: int) -> Taken:
    bodies = [record(number, size_bytes) for number in range(batch_size)]
    each = max(1, num_records // (num_producers * batch_size))
    taken = Taken(each * batch_size * num_producers)
    incarnation = time.time_ns() // 1000
    options = [*rpc.CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # a connection each, as producers have
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(num_producers)]
    begin = asyncio.Event()
    tasks = [
        asyncio.create_task(_produce(channels[n], f"bench/load-{n}", incarnation, bodies, each, taken, begin))
        for n in range(num_producers)
    ]
    await asyncio.sleep(0)
    began = time.perf_counter()
    begin.set()
    await asyncio.gather(*tasks)
    taken.seconds = time.perf_counter() - began
    for channel in channels:
        await channel.close()
    return taken


async def _produce(
    channel: grpc.aio.Channel,
    producer: str,
    incarnation: int,
    bodies: list[bytes],
    num_batches: int,
    taken: Taken,
    begin: asyncio.Event,
) -> None:
    stream = channel.stream_stream(
        _METHOD, request_serializer=None, response_deserializer=metrics_pb2.IngestAck.FromString
    )()
    message = metrics_pb2.RecordBatch(producer=producer, incarnation=incarnation, records=bodies).SerializeToString()
    sent: deque[tuple[float, int]] = deque()
    room = asyncio.Semaphore(WINDOW_BATCHES)
    await begin.wait()
    acks = asyncio.create_task(_acknowledge(stream, sent, room, num_batches * len(bodies), taken))
    for number in range(num_batches):
        await room.acquire()
        first = 1 + number * len(bodies)
        sequence = metrics_pb2.RecordBatch(first_sequence=first).SerializeToString()  # messages are joined by joining
        sent.append((time.perf_counter(), first + len(bodies) - 1))
        await stream.write(message + sequence)
    await acks
    await stream.done_writing()


async def _acknowledge(
    stream: grpc.aio.StreamStreamCall, sent: deque[tuple[float, int]], room: asyncio.Semaphore, last: int, taken: Taken
) -> None:
    while True:
        ack = await stream.read()
        assert isinstance(ack, metrics_pb2.IngestAck)
        now = time.perf_counter()
        while sent and sent[0][1] <= ack.through_sequence:
            taken.latencies_s.append(now - sent.popleft()[0])
            room.release()
        if ack.through_sequence >= last:
            return
