"""The bounded queue between a call that records something and the thread that ships it.

Putting never waits. When the queue is full, what matters least goes first: debug and info lines, then warnings and
errors, then metrics; and among them the oldest. What went is counted.
"""

import enum
import os
import threading
from collections import deque
from dataclasses import dataclass
from weakref import WeakSet


class Priority(enum.IntEnum):
    """What a record is worth when not all can be kept."""

    LOG = 0
    """Debug and info lines."""
    WARNING = 1
    """Warnings and worse."""
    METRICS = 2
    """Numbers, and records of a program's own."""


@dataclass(frozen=True)
class Record:
    """One encoded record."""

    priority: Priority
    body: bytes
    """A JSON object. Empty: it was dropped, only its number is left."""


class RecordQueue:
    """Records in the order they were put, up to max_records and max_bytes. Any thread."""

    def __init__(self, *, max_records: int, max_bytes: int) -> None:
        self._max_records, self._max_bytes = max_records, max_bytes
        self._renew()
        _queues.add(self)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may log while this thread is in here
        self._lanes: tuple[deque[tuple[int, bytes]], ...] = (deque(), deque(), deque())
        self._num_records = self._num_bytes = self.num_put = 0
        self.num_dropped = [0, 0, 0]

    def put(self, body: bytes, priority: Priority) -> int:
        """Add a record, dropping others if it must; how many are waiting now."""
        size = len(body)
        with self._lock:
            self.num_put += 1
            while self._num_records >= self._max_records or self._num_bytes + size > self._max_bytes:
                if not self._drop_up_to(priority):
                    self.num_dropped[priority] += 1
                    return self._num_records
            self._lanes[priority].append((self.num_put, body))
            self._num_records += 1
            self._num_bytes += size
            return self._num_records

    def take(self, *, max_records: int, max_bytes: int) -> list[Record]:
        """Remove the oldest; at least one if there is one."""
        taken: list[Record] = []
        size = 0
        with self._lock:
            while len(taken) < max_records:
                waiting = [(lane[0][0], number) for number, lane in enumerate(self._lanes) if lane]
                if not waiting:
                    break
                number = min(waiting)[1]
                body = self._lanes[number][0][1]
                if taken and size + len(body) > max_bytes:
                    break
                self._remove_oldest(number)
                size += len(body)
                taken.append(Record(Priority(number), body))
        return taken

    def oldest(self) -> int | None:
        """The count at which the oldest waiting record was put. None: the queue is empty."""
        with self._lock:
            return min((lane[0][0] for lane in self._lanes if lane), default=None)

    def __len__(self) -> int:
        return self._num_records

    @property
    def is_half_full(self) -> bool:
        return self._num_records * 2 >= self._max_records or self._num_bytes * 2 >= self._max_bytes

    def _drop_up_to(self, priority: Priority) -> bool:
        for number in range(priority + 1):
            if self._lanes[number]:
                self._remove_oldest(number)
                self.num_dropped[number] += 1
                return True
        return False

    def _remove_oldest(self, number: int) -> None:
        _, body = self._lanes[number].popleft()
        self._num_records -= 1
        self._num_bytes -= len(body)


_queues: WeakSet[RecordQueue] = WeakSet()


def _in_forked_child() -> None:
    """The parent's records are the parent's; its threads, one of which may hold the lock, are not here."""
    for queue in list(_queues):
        queue._renew()


os.register_at_fork(after_in_child=_in_forked_child)
