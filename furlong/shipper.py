"""The thread that ships a process's records: numbers them, batches them, sends them again until they are acknowledged.

While the metrics service is away, holds, or makes no progress, records go to the spool; when it is back, the spool goes
first, then what is new. A new stream is given one batch until it has acknowledged one: a service that holds, as when
its disk is full, is asked now and then, not flooded. Works in short turns, so that callers never wait long for the
interpreter. In a forked child nothing is sent (gRPC does not survive a fork): its records stay in the spool, for the
metrics service to collect when the child has ended.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from furlong.recordqueue import Record, RecordQueue
from furlong.spool import Batch, Spool

if TYPE_CHECKING:
    from furlong.ingeststream import Acknowledged, Happening, IngestStream

MAX_BATCH_RECORDS = 1024
SPOOL_BATCH_RECORDS = 256
MAX_BATCH_BYTES = 1024 * 1024
WINDOW_BATCHES = 16
WINDOW_BYTES = 8 * 1024 * 1024
LINGER_S = 0.02
"""How long a record waits for others to fill its batch."""
QUIET_S = 1.0
"""After so long without records the next one wakes the thread; before, the thread looks for it, and no call pays."""
BREATH_S = 0.001
"""Between two turns of work. Of the calls made meanwhile one waits for the next turn: longer, and fewer do."""
GRACE_S = 1.0
"""How long records stay in memory when the service is not there, before they go to disk."""
CONNECT_TIMEOUT_S = 3.0
STALL_S = 5.0
"""A stream that acknowledges nothing for so long is given up."""
MAX_BACKOFF_S = 2.0
HEARTBEAT_S = 10.0
"""How often a process that says nothing lets the service know that it lives."""


@dataclass
class FlushRequest:
    """Somebody waits until all records put so far are acknowledged."""

    through_put: int
    through_sequence: int | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Sent:
    batch: Batch
    source: Spool | None


class Shipper(threading.Thread):
    """Owns the window of unacknowledged batches, the spool and the stream. Others touch only `wake` and `flushes`."""

    def __init__(
        self,
        records: RecordQueue,
        spool: Spool,
        *,
        find_address: Callable[[], str | None] | None,
        take_left_over: Callable[[], list[Spool]],
        report_drops: Callable[[list[int]], None],
        beat: Callable[[], None],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        super().__init__(name="furlong-telemetry", daemon=True)
        self.wake = threading.Event()
        self.idle = True
        self.urgent = False
        self.flushes: deque[FlushRequest] = deque()
        self.close_deadline: float | None = None
        self._close_began = 0.0
        self.num_acknowledged = self.num_refused = 0
        self.last_error = ""
        self._records, self._spool = records, spool
        self._find_address, self._take_left_over, self._report_drops = find_address, take_left_over, report_drops
        self._beat, self._heartbeat_s = beat, heartbeat_s
        self._beat_at = time.monotonic()
        self._left_over: list[Spool] | None = None
        self._happened: deque[Happening] = deque()
        self._stream: IngestStream | None = None
        self._connecting: IngestStream | None = None
        self._proven = False  # whether the stream has acknowledged anything
        self._window: deque[_Sent] = deque()
        self._memory: deque[Batch] = deque()  # numbered, neither sent nor spooled
        self._last_sequence = self._acked_sequence = 0
        self._away_since = self._progress_at = self._took_at = time.monotonic()
        self._random = random.Random()  # its own: a run's numbers must not depend on how often a service was away
        self._next_attempt = self._attempted_at = 0.0
        self._backoff_s = 0.1
        self._failed_at = 0.0
        self._reported_drops = [0, 0, 0]
        self._reported_at = 0.0

    @property
    def connected(self) -> bool:
        return self._stream is not None

    @property
    def spooled_bytes(self) -> int:
        return self._spool.size_bytes

    def tell(self, happening: "Happening") -> None:
        """From the stream's thread."""
        self._happened.append(happening)
        if self.urgent or not self._can_take():
            self.wake.set()

    def request_close(self, budget_s: float) -> None:
        """Send what is left, at most so long, and end. A service that is away is looked for once more."""
        self._close_began = time.monotonic()
        self._next_attempt = 0.0
        self.close_deadline = self._close_began + budget_s
        self.urgent = True
        self.wake.set()

    def run(self) -> None:
        self._spool.ascend()
        while not self._finished():
            self._wait()
            self._step(time.monotonic())
        self._end()

    # -- one turn

    def _wait(self) -> None:
        self.idle = self._is_quiet()  # the next record wakes this thread
        if not self._happened and not (self.idle and len(self._records)):
            self.wake.wait(self._patience_s())
        was_idle, self.idle = self.idle, False
        self.wake.clear()
        if was_idle and len(self._records) and not self.urgent:
            self.wake.wait(LINGER_S)
            self.wake.clear()

    def _is_quiet(self) -> bool:
        settled = self._can_take() and not self._window and not self.urgent
        return settled and time.monotonic() - self._took_at > QUIET_S

    def _patience_s(self) -> float:
        if self.urgent or self._can_take():
            return 0.5 if self.idle else LINGER_S
        busy = len(self._records) or self._memory or self._window or self._connecting or self._spool.has_unread
        return 0.1 if busy else 0.5

    def _can_take(self) -> bool:
        return self.connected and len(self._window) < self._window_batches and not self._spool.has_unread

    @property
    def _window_batches(self) -> int:
        return WINDOW_BATCHES if self._proven else 1

    def _step(self, now: float) -> None:
        while self._happened:
            self._take_in(self._happened.popleft(), now)
        if self._stream is not None and self._window and now - self._progress_at > STALL_S:
            self.last_error = f"nothing was acknowledged for {STALL_S:g} s"
            self._lose_stream(now)
        if self._stream is not None:
            self._fill(self._stream, now)
        else:
            self._connect(now)
        if self._must_spool(now):
            self._to_disk()
        self._settle_flushes()
        self._tell_drops(now)
        self._tell_life(now)

    def _take_in(self, happening: "Happening", now: float) -> None:
        from furlong.ingeststream import Acknowledged, Connected

        if isinstance(happening, Connected):
            if happening.stream is self._connecting:
                self._stream, self._connecting = self._connecting, None
                self._progress_at, self._proven = now, False
                if self._left_over is None:
                    self._left_over = self._take_left_over()
        elif isinstance(happening, Acknowledged):
            if happening.stream is self._stream:
                self._acknowledged(happening, now)
        elif happening.stream in (self._stream, self._connecting):
            self.last_error = happening.reason
            self._lose_stream(now)

    def _acknowledged(self, ack: "Acknowledged", now: float) -> None:
        self._progress_at, self._backoff_s = now, 0.1  # a stream that takes nothing is no reason to hurry
        self._proven = True
        self.num_refused += ack.num_refused
        if ack.num_refused:
            self.last_error = f"refused: {ack.first_refusal}"
        while self._window:
            sent = self._window[0]
            mine = (sent.batch.producer, sent.batch.incarnation) == (ack.producer, ack.incarnation)
            if not mine or sent.batch.last_sequence > ack.through_sequence:
                return
            self._window.popleft()
            self.num_acknowledged += len(sent.batch.records)
            if sent.source is not None:
                sent.source.acknowledge(sent.batch.last_sequence)
            if sent.source is None or sent.source is self._spool:
                self._acked_sequence = sent.batch.last_sequence
            elif sent.source.is_empty and self._left_over:
                self._left_over.remove(sent.source)

    def _lose_stream(self, now: float) -> None:
        for stream in (self._stream, self._connecting):
            if stream is not None:
                stream.cancel()
        if self._stream is not None:
            self._away_since = now
        self._stream = self._connecting = None
        self._failed_at = now
        self._next_attempt = now + self._backoff_s * self._random.uniform(0.5, 1.0)
        self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2)
        unsent = [sent.batch for sent in self._window if sent.source is None]
        self._memory.extendleft(reversed(unsent))
        self._window.clear()
        for spool in (self._spool, *(self._left_over or ())):
            spool.rewind()

    def _connect(self, now: float) -> None:
        if self._find_address is None:
            return
        if self._connecting is not None:
            if now - self._attempted_at > CONNECT_TIMEOUT_S:
                self.last_error = f"no answer within {CONNECT_TIMEOUT_S:g} s"
                self._lose_stream(now)
            return
        if now < self._next_attempt:
            return
        self._attempted_at = now
        address = self._find_address()
        if address is None:
            self.last_error = "the metrics service has not published its address"
            self._lose_stream(now)
            return
        from furlong.ingeststream import IngestStream  # gRPC is imported where it is first used, off the caller's path

        self._connecting = IngestStream(address, self.tell)

    def _fill(self, stream: "IngestStream", now: float) -> None:
        while len(self._window) < self._window_batches and self._window_bytes() < WINDOW_BYTES:
            found = self._next_batch()
            if found is None:
                return
            if not self._window:
                self._progress_at = now
            self._took_at = now
            self._window.append(found)
            stream.send(found.batch)
            time.sleep(BREATH_S)

    def _window_bytes(self) -> int:
        return sum(sent.batch.size_bytes for sent in self._window)

    def _next_batch(self) -> _Sent | None:
        for spool in (*(self._left_over or ()), self._spool):
            batch = spool.read(max_records=MAX_BATCH_RECORDS, max_bytes=MAX_BATCH_BYTES)
            if batch is not None:
                return _Sent(batch, spool)
        batch = self._memory.popleft() if self._memory else self._number(self._take(MAX_BATCH_RECORDS))
        return _Sent(batch, None) if batch is not None else None

    def _take(self, max_records: int) -> list[Record]:
        return self._records.take(max_records=max_records, max_bytes=MAX_BATCH_BYTES)

    def _number(self, taken: list[Record]) -> Batch | None:
        if not taken:
            return None
        batch = Batch(self._spool.producer, self._spool.incarnation, self._last_sequence + 1, tuple(taken))
        self._last_sequence = batch.last_sequence
        return batch

    # -- the spool

    def _must_spool(self, now: float) -> bool:
        if not (self._memory or len(self._records)):
            return False
        if self._stream is not None:
            return not self._can_take() and self._records.is_half_full
        patient = self._find_address is not None and self.close_deadline is None
        return not patient or now - self._away_since > GRACE_S or self._records.is_half_full

    def _to_disk(self) -> None:
        """Move what is in memory to the spool. On a full disk it stays in memory, where the queue's bound holds."""
        if not self._window_to_disk():
            return
        while True:
            if not self._memory:
                batch = self._number(self._take(SPOOL_BATCH_RECORDS))
                if batch is None:
                    return
                self._memory.append(batch)
            try:
                self._spool.append(self._memory[0])
            except OSError as error:
                self.last_error = f"spool: {error}"
                return
            self._memory.popleft()
            time.sleep(BREATH_S)

    def _window_to_disk(self) -> bool:
        """First what was sent and is not acknowledged, so that the spool's order is that of the numbers."""
        for sent in self._window:
            if sent.source is None:
                try:
                    self._spool.append(sent.batch, is_read=True)
                except OSError as error:
                    self.last_error = f"spool: {error}"
                    return False
                sent.source = self._spool
        return True

    # -- flush, close, drops

    def _settle_flushes(self) -> None:
        for request in list(self.flushes):
            oldest = self._records.oldest()
            if request.through_sequence is None and (oldest is None or oldest > request.through_put):
                request.through_sequence = self._last_sequence
            waits_for = request.through_sequence
            if waits_for is not None and waits_for <= self._acked_sequence and not self._left_over:
                request.done.set()
                self.flushes.remove(request)
        self.urgent = (bool(self.flushes) and self.connected) or self.close_deadline is not None

    def _tell_drops(self, now: float) -> None:
        dropped = [a + b for a, b in zip(self._records.num_dropped, self._spool.num_dropped, strict=True)]
        listens = self.connected and self._proven
        if dropped == self._reported_drops or not listens or now - self._reported_at < 1.0:
            return
        self._report_drops([new - old for new, old in zip(dropped, self._reported_drops, strict=True)])
        self._reported_drops, self._reported_at = dropped, now

    def _tell_life(self, now: float) -> None:
        """Only to a service that listens: what is told late is no sign of life."""
        if self.connected and self.close_deadline is None and now - self._beat_at >= self._heartbeat_s:
            self._beat_at = now
            self._beat()

    def _finished(self) -> bool:
        if self.close_deadline is None:
            return False
        if not self.flushes or time.monotonic() > self.close_deadline:
            return True
        failed_since = self._failed_at > self._close_began
        return self._find_address is None or (failed_since and self._connecting is None)

    def _end(self) -> None:
        self._lose_stream(time.monotonic())
        self._to_disk()
        for spool in (self._spool, *(self._left_over or ())):
            spool.release()
