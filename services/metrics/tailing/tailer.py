"""The thread that reads files and hands what it finds to the store. The only one that touches the files it follows.

Batches go to the store one after the other; while one is on its way the next is made. What the store did not take is
sent again, the same, before anything else. Reading a backlog yields to producers that send.
"""

import datetime
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import structlog

from furlong.records import Value
from services.metrics.engines.rows import EngineRows
from services.metrics.engines.sglang_lines import read_line
from services.metrics.tailing.followed import Moment
from services.metrics.tailing.follower import Batch, Follower
from services.metrics.tailing.heading import TextLine
from services.metrics.tailing.pace import Pace
from services.metrics.tailing.records import Counts
from services.metrics.tailing.store_link import StoreLink

log = structlog.get_logger()

POLL_S = 0.1
MAX_BATCH_BYTES = 512 * 1024
_SHARED_BATCH_BYTES = 128 * 1024
MAX_SAMPLES = 10_000
"""Readings of endpoints that wait."""
ENGINES_MARK = "engines"
_RETRY_S = 0.25
_READING_SHARE = 0.6
"""Of the time to close: the rest is for the store."""
_SUBMIT_LIMIT_S = 60.0
_DISCOVER_SHARE = 20
"""Looking for files takes at most one part in so many of the time."""
_MAX_DISCOVER_S = 5.0


@dataclass(frozen=True)
class Sample:
    """What an endpoint said."""

    instance: str
    at_s: float
    values: dict[str, Value]


@dataclass(frozen=True)
class TailedFile:
    """How a file is followed."""

    path: str
    behind_bytes: int
    counts: Counts


class Tailer(threading.Thread):
    """Started by `start`, ended by `close`."""

    def __init__(
        self,
        link: StoreLink,
        *,
        run: str,
        patterns: Sequence[str],
        interval_s: float,
        pace: Pace | None = None,
        is_own: Callable[[str], bool] = lambda path: False,
        on_death: Callable[[str], None] = lambda reason: None,
        on_left_out: Callable[[int], None] = lambda count: None,
    ) -> None:
        """on_left_out: told in this thread how many numbers of engines were left out, since the start."""
        super().__init__(name="metrics-tailer", daemon=True)
        self._link, self._run, self._patterns, self._is_own = link, run, patterns, is_own
        self._on_death, self._pace, self._on_left_out = on_death, pace or Pace(""), on_left_out
        self.rows = EngineRows(run=run, interval_s=interval_s)
        self._rows_changed = False
        self._samples: queue.Queue[Sample] = queue.Queue(MAX_SAMPLES)
        self._closing = threading.Event()
        self._close_by_s = 0.0
        self._follower: Follower | None = None
        self._waiting: tuple[Batch, Future[object]] | None = None
        self._next_discover_s = 0.0
        self._failing = False
        self._num_unread = 0
        """Values of readings beyond the bound."""

    def add_sample(self, sample: Sample) -> None:
        """From any one thread."""
        try:
            self._samples.put_nowait(sample)
        except queue.Full:
            self._num_unread += len(sample.values)

    def status(self) -> list[TailedFile]:
        """From any thread."""
        follower = self._follower
        files = list(follower.files.values()) if follower else []
        return [TailedFile(f.path, f.behind_bytes, f.reader.counts) for f in files]

    def close(self, timeout_s: float) -> bool:
        """Read what is there, as far as the time goes, hand it on, end. Whether it ended."""
        self._close_by_s = time.monotonic() + timeout_s * _READING_SHARE
        self._closing.set()
        self.join(timeout_s)
        return not self.is_alive()

    def run(self) -> None:
        """Until `close`."""
        try:
            self._load()
            while not self._closing.is_set():
                began_s = time.thread_time()
                batch = Batch()
                more = self._fill(batch)
                if self._save(batch):
                    self._give_way(began_s, hurry=more)
            self._finish()
        except Exception as error:  # the top of the thread
            log.error("tailer_failed", error=repr(error), exc_info=error)
            self._on_death(f"the tailer ended: {error!r}")
        finally:
            if self._follower is not None:
                self._follower.close()

    def _load(self) -> None:
        marks = self._link.load()
        self.rows.load(marks.pop(ENGINES_MARK, b"{}"))
        self._follower = Follower(
            self._patterns, run=self._run, marks=marks, is_own=self._is_own, on_text=self._read_numbers
        )

    def _fill(self, batch: Batch) -> bool:
        """Whether there is more to read at once."""
        follower = self._must_follow()
        moment = _now()
        if moment.mono_s >= self._next_discover_s:
            follower.discover(moment, batch)
            took_s = time.monotonic() - moment.mono_s
            self._next_discover_s = moment.mono_s + min(_MAX_DISCOVER_S, took_s * _DISCOVER_SHARE)
        more, max_bytes = True, _SHARED_BATCH_BYTES if self._pace.is_shared else MAX_BATCH_BYTES
        while more and batch.size_bytes < max_bytes:
            more = follower.read(moment, batch, max_bytes=max_bytes)
        self._add_rows(batch)
        return more

    def _add_rows(self, batch: Batch, *, everything: bool = False) -> None:
        now_s = time.time()
        for _ in range(self._samples.qsize()):
            sample = self._samples.get_nowait()
            self.rows.add(sample.instance, sample.at_s, sample.values, now_s=now_s, from_line=False)
        self._on_left_out(self.rows.num_left_out + self._num_unread)
        due = self.rows.due(now_s, everything=everything)
        batch.add(due)
        if due or self._rows_changed:
            batch.marks[ENGINES_MARK] = self.rows.dump() if self.rows.has_lines else None
            self._rows_changed = False

    def _read_numbers(self, instance: str, line: TextLine) -> None:
        reading = read_line(line.text)
        if reading is None:
            return
        if line.pid:  # several engines that Ray prints into one file
            instance = f"{line.actor or 'pid'}-{line.pid}"
        at_s = datetime.datetime.fromisoformat(line.ts).timestamp()
        name = f"{instance}-{reading.rank}" if reading.rank else instance
        self.rows.add(name, at_s, reading.values, now_s=time.time())
        self._rows_changed = True

    def _save(self, batch: Batch) -> bool:
        """Hand it to the store once the one before is on disk. False: closing, and it was not."""
        if not self._settle():
            return False
        if batch.bodies or batch.marks:
            self._waiting = batch, self._submit(batch)
        return True

    def _settle(self) -> bool:
        """Wait for the batch that is on its way; send it again until it is on disk."""
        while self._waiting is not None:
            batch, done = self._waiting
            try:
                done.result(_SUBMIT_LIMIT_S)
            except FutureTimeout:
                log.warning("tail_store_slow", waited_s=_SUBMIT_LIMIT_S)
                continue
            except Exception as error:  # whatever the store failed with: it holds nothing of the batch
                if not self._failing:
                    log.warning("tail_held", error=str(error), num_records=len(batch.bodies))
                self._failing = True
                if self._closing.wait(_RETRY_S):
                    return self._last_try(batch)
                self._waiting = batch, self._submit(batch)
                continue
            self._failing = False
            self._link.saved(len(batch.bodies))
            self._waiting = None
        return True

    def _last_try(self, batch: Batch) -> bool:
        try:
            self._submit(batch).result(_RETRY_S * 4)
        except Exception as error:
            log.warning("tail_not_saved", error=str(error), num_records=len(batch.bodies))  # read again next time
            return False
        self._link.saved(len(batch.bodies))
        self._waiting = None
        return True

    def _submit(self, batch: Batch) -> "Future[object]":
        return self._link.submit(tuple(batch.bodies), batch.marks)

    def _give_way(self, began_s: float, *, hurry: bool) -> None:
        """Between batches. began_s: CPU time of this thread when the batch was begun."""
        if not hurry:
            self._closing.wait(POLL_S)
            return
        rest_s = self._pace.rest_s(time.thread_time() - began_s)
        if rest_s:
            self._closing.wait(rest_s)

    def _finish(self) -> None:
        """What was written before the end is read, up to the half line that it ends with; a backlog waits for the next
        start.
        """
        batch = Batch()
        more = self._fill(batch)
        while more and time.monotonic() < self._close_by_s and self._save(batch):
            batch = Batch()
            more = self._fill(batch)
        if not more:
            self._must_follow().finish(_now(), batch)
            self._add_rows(batch, everything=True)
        if self._save(batch) and self._settle():
            log.info("tail_closed", num_files=len(self._must_follow().files), has_backlog=more)

    def _must_follow(self) -> Follower:
        assert self._follower is not None  # set by _load, before anything else
        return self._follower


def _now() -> Moment:
    return Moment(datetime.datetime.now(datetime.UTC), time.monotonic())
