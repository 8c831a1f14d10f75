"""One producer's gRPC stream: reads batches, has them stored, acknowledges them in order, each after its commit.

What all streams together hold is bounded: beyond MAX_WAITING_BYTES batches stay as the bytes that came and nothing more
is read, so that producers wait in turn; beyond MAX_RAW_BYTES of those a stream is ended, and its producer tries again
later. Batches that one commit stored are acknowledged together.
"""

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Future
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from furlong.v1 import metrics_pb2
from services.metrics.intake import MAX_BATCH_RECORDS, RecordsIn, Taken
from services.metrics.writer import Sending, StoreFailed, StoreFull, Writer

log = structlog.get_logger()

WINDOW_BATCHES = 16
"""Batches of one stream that may wait for their commit."""
MAX_WAITING_BYTES = 8 * 1024 * 1024
"""Bytes of all streams that may wait for their commit."""
MAX_RAW_BYTES = 80 * 1024 * 1024
"""Bytes of all streams that may wait for room."""
_MAX_INTEGER = 2**63 - 1

Context = grpc.aio.ServicerContext[Any, Any]  # Any: the messages are fixed by the method


class _Waiting:
    """A batch on its way to the disk."""

    __slots__ = ("done", "size_bytes", "source", "stream")

    def __init__(self, stream: "IngestStream", batch: RecordsIn, size_bytes: int) -> None:
        self.stream, self.size_bytes = stream, size_bytes
        self.source = (batch.producer, batch.incarnation)
        self.done: Future[Taken] | None = None


class StreamIntake:
    """What the streams share: the writer, the room, and one way back from the writer's thread to the event loop."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._room = _Room(MAX_WAITING_BYTES)
        self._done: deque[_Waiting] = deque()
        self._told = False
        self._num_raw_bytes = 0
        self._last_warned = ""

    async def room_for(self, size_bytes: int) -> bool:
        """Wait for room for a message of so many bytes. False: too much waits already."""
        if self._room.try_take(size_bytes):
            return True
        if self._num_raw_bytes and self._num_raw_bytes + size_bytes > MAX_RAW_BYTES:
            return False
        self._num_raw_bytes += size_bytes
        try:
            await self._room.take(size_bytes)
        finally:
            self._num_raw_bytes -= size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """What had room is dealt with."""
        self._room.give_back(size_bytes)

    def submit(self, stream: "IngestStream", batch: RecordsIn, size_bytes: int) -> _Waiting:
        """Have a batch stored that has room."""
        waiting = _Waiting(stream, batch, size_bytes)
        waiting.done = self._writer.submit(batch, stream.sending)
        waiting.done.add_done_callback(lambda _: self._stored(waiting))
        return waiting

    def warn(self, producer: str, taken: Taken) -> None:
        """Records were refused; once a reason."""
        if taken.first_refusal != self._last_warned:
            self._last_warned = taken.first_refusal
            log.warning("records_refused", producer=producer, num_refused=taken.num_refused, reason=taken.first_refusal)

    def _stored(self, waiting: _Waiting) -> None:
        """From the writer's thread: one call into the loop for all batches of a commit."""
        self._done.append(waiting)
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._told = False
        while self._done:
            waiting = self._done.popleft()
            self._room.give_back(waiting.size_bytes)  # a producer that reads no acknowledgement holds nobody up
            waiting.stream.wake()


class IngestStream:
    """Event loop only."""

    def __init__(self, context: Context, intake: StreamIntake) -> None:
        self.sending = Sending()
        """What the writer knows of this stream."""
        self._context, self._intake = context, intake
        self._waiting: deque[_Waiting] = deque()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._ended = False

    async def run(self) -> None:
        """Until the producer ends the stream, or `stop`."""
        self._reading = asyncio.create_task(self._read())
        try:
            await self._acknowledge_all()
            if not self._reading.cancelled():
                await self._reading
        finally:
            self._reading.cancel()
            self._waiting.clear()

    def stop(self) -> None:
        """Read no more; what was read is still acknowledged. What was on its way, the producer sends again."""
        if self._reading is not None:
            self._reading.cancel()

    def wake(self) -> None:
        """A batch of this stream is stored, or failed."""
        self._changed.set()

    async def _read(self) -> None:
        try:
            while True:
                raw: bytes = await self._context.read()
                if raw is grpc.aio.EOF:
                    return
                size = len(raw)
                if not await self._intake.room_for(size):
                    await self._context.abort(
                        grpc.StatusCode.RESOURCE_EXHAUSTED, "too much waits to be stored: hold it"
                    )
                message, problem = _parse(raw)
                del raw  # here and below: a large batch is held as few times as can be
                if problem:
                    self._intake.give_back(size)
                    await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
                bodies = tuple(message.records)
                batch = RecordsIn(message.producer, message.incarnation, message.first_sequence, bodies)
                del message, bodies
                await self._submit(batch, size)
                del batch
        finally:
            self._ended = True
            self._changed.set()

    async def _submit(self, batch: RecordsIn, size_bytes: int) -> None:
        """In pieces that one commit can take: a message of tiny records may hold hundreds of thousands."""
        left_bytes = size_bytes
        try:
            for at in range(0, max(1, len(batch.bodies)), MAX_BATCH_RECORDS):
                bodies = batch.bodies[at : at + MAX_BATCH_RECORDS]
                is_last = at + MAX_BATCH_RECORDS >= len(batch.bodies)
                size = left_bytes if is_last else sum(map(len, bodies))
                piece = RecordsIn(batch.producer, batch.incarnation, batch.first_sequence + at, bodies)
                self._waiting.append(self._intake.submit(self, piece, size))
                left_bytes -= size
                while len(self._waiting) >= WINDOW_BATCHES:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self._intake.give_back(left_bytes)

    async def _acknowledge_all(self) -> None:
        while self._waiting or not self._ended:
            if not self._waiting or not _is_done(self._waiting[0]):
                self._changed.clear()
                await self._changed.wait()
                continue
            await self._acknowledge()

    async def _acknowledge(self) -> None:
        """All batches of the foremost producer that are stored, with one message."""
        producer, incarnation = source = self._waiting[0].source
        through, num_refused, refusal = 0, 0, ""
        while self._waiting and _is_done(self._waiting[0]):
            waiting = self._waiting[0]
            if waiting.source != source:
                break
            self._waiting.popleft()
            taken = await self._result_of(waiting)
            through, num_refused = taken.through_sequence, num_refused + taken.num_refused
            refusal = refusal or taken.first_refusal
            if taken.num_refused:
                self._intake.warn(producer, taken)
        self._has_room.set()
        await self._context.write(
            metrics_pb2.IngestAck(
                producer=producer,
                incarnation=incarnation,
                through_sequence=through,
                num_refused=num_refused,
                first_refusal=refusal,
            )
        )

    async def _result_of(self, waiting: _Waiting) -> Taken:
        assert waiting.done is not None
        try:
            return waiting.done.result(0)
        except StoreFull as error:
            await self._context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except StoreFailed as error:
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, f"the store cannot be written: {error}")
        raise AssertionError("abort raises")


class _Room:
    """Bytes that may be held. One that is larger than all the room gets it when it is alone."""

    def __init__(self, size_bytes: int) -> None:
        self._size, self._used = size_bytes, 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, size_bytes: int) -> bool:
        """Without waiting; not before those that wait."""
        if self._queue or (self._used and self._used + size_bytes > self._size):
            return False
        self._used += size_bytes
        return True

    async def take(self, size_bytes: int) -> None:
        """In the order of asking."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size_bytes)
            raise

    def give_back(self, size_bytes: int) -> None:
        """Who waits is let in, in order."""
        self._used -= size_bytes
        while self._queue:
            size, turn = self._queue[0]
            if turn.done():
                self._queue.popleft()
                continue
            if self._used and self._used + size > self._size:
                return
            self._queue.popleft()
            self._used += size
            turn.set_result(None)


def _is_done(waiting: _Waiting) -> bool:
    return waiting.done is not None and waiting.done.done()


def _parse(raw: bytes) -> tuple[metrics_pb2.RecordBatch, str]:
    """A batch, and what is wrong with it."""
    message = metrics_pb2.RecordBatch()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        return message, f"not a RecordBatch: {error}"
    return message, _problem(message)


def _problem(batch: metrics_pb2.RecordBatch) -> str:
    """Why a batch cannot be taken at all. Empty: it can."""
    if not batch.producer or len(batch.producer) > 512:
        return f"producer must have 1 to 512 characters, got {len(batch.producer)}"
    if not 1 <= batch.incarnation <= _MAX_INTEGER:
        return f"incarnation must be 1 to {_MAX_INTEGER}, got {batch.incarnation}"
    if not 1 <= batch.first_sequence <= _MAX_INTEGER - len(batch.records):
        return f"first_sequence must be 1 to {_MAX_INTEGER}, got {batch.first_sequence}"
    return ""
