"""The bounded queue between a call that records something and the thread that ships it.

Putting never waits: who takes holds the lock for as long as it takes to move some references. When the queue is full,
what matters least goes first: debug and info lines, then warnings and errors, then metrics; and among them the oldest.
What went is counted.
"""

import enum
import os
import threading
from bisect import bisect_right
from collections import deque
from functools import partial
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakSet


class Priority(enum.IntEnum):
    """What a record is worth when not all can be kept."""

    LOG = 0
    """Debug and info lines."""
    WARNING = 1
    """Warnings and worse."""
    METRICS = 2
    """Numbers, and records of a program's own."""


class Record(NamedTuple):
    """One encoded record."""

    priority: Priority
    body: bytes
    """A JSON object. Empty: it was dropped, only its number is left."""


_RECORD = partial(tuple.__new__, Record)  # as Record(...), without a call in Python for each


class RecordQueue:
    """Records in the order they were put, up to max_records and max_bytes. Any thread."""

    def __init__(self, *, max_records: int, max_bytes: int) -> None:
        self._max_records, self._max_bytes = max_records, max_bytes
        self._renew()
        _queues.add(self)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may log while this thread is in here
        self._lanes: tuple[deque[tuple[int, Priority, bytes]], ...] = (deque(), deque(), deque())
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
            self._lanes[priority].append((self.num_put, priority, body))
            self._num_records += 1
            self._num_bytes += size
            return self._num_records

    def take(self, *, max_records: int, max_bytes: int) -> list[Record]:
        """Remove the oldest; at least one if there is one."""
        with self._lock:
            if not self._num_records:
                return []
            taken = self._pop_oldest(max_records)
            sizes = list(accumulate([len(item[2]) for item in taken]))
            fit = max(1, bisect_right(sizes, max_bytes))
            for item in reversed(taken[fit:]):
                self._lanes[item[1]].appendleft(item)
            del taken[fit:]
            self._num_records -= len(taken)
            self._num_bytes -= sizes[len(taken) - 1]
        return list(map(_RECORD, [item[1:] for item in taken]))

    def _pop_oldest(self, max_records: int) -> list[tuple[int, Priority, bytes]]:
        """Out of all lanes, in the order they were put."""
        popped = [[lane.popleft() for _ in range(min(len(lane), max_records))] for lane in self._lanes if lane]
        if len(popped) == 1:
            return popped[0]
        merged = sorted(item for some in popped for item in some)  # by the count, which none share
        for item in reversed(merged[max_records:]):
            self._lanes[item[1]].appendleft(item)
        return merged[:max_records]

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
        _, _, body = self._lanes[number].popleft()
        self._num_records -= 1
        self._num_bytes -= len(body)


_queues: WeakSet[RecordQueue] = WeakSet()


def _in_forked_child() -> None:
    """The parent's records are the parent's; its threads, one of which may hold the lock, are not here."""
    for queue in list(_queues):
        queue._renew()


os.register_at_fork(after_in_child=_in_forked_child)
