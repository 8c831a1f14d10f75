"""Numbers that all processes of a router share: 64-bit integers in memory without a file.

Owns the layout and the locks. Each number is written either by one process alone (its column) or under a lock; reading
needs none, since aligned 64-bit writes are never seen by halves. The kernel drops the lock of a process that is killed.
"""

import contextlib
import fcntl
import mmap
import os
import signal
import struct
import time
from collections.abc import Generator

WORD_BYTES = 8
LINE_WORDS = 8
"""A cache line, so that processes do not take it from each other."""
LOCK_LIMIT_S = 1.0
"""A lock is held for microseconds. Who holds it for so long is stopped, and would have all others stand still."""
LOCK_POLL_S = 0.001
_FLOCK = "hhqqi"
"""struct flock of the kernel: type, whence, start, length, process id."""
_WAITING, _SINCE, _CLOSED = 0, 1, 2
_PER_COLUMN = ("in_flight", "requests", "failures", "heard")
_PER_SLOT = ("turn", "is_open", "in_a_row", "try_at", "trial_by")


class SharedMemory:
    """One column a process, one slot a registered worker.

    in_flight, requests, failures, heard: of each column its slots; heard in nanoseconds of the monotonic clock.
    turn: by slot, when it was last picked, in nanoseconds. is_open, in_a_row, try_at, trial_by: its breaker.
    """

    def __init__(self, fd: int, *, num_processes: int, num_slots: int) -> None:
        self.fd = fd
        self.num_processes = num_processes
        self.num_slots = num_slots
        words = memoryview(mmap.mmap(fd, _size_bytes(num_processes, num_slots))).cast("q")
        self._words = words
        at = LINE_WORDS * (1 + num_processes)
        views: list[list[memoryview[int]]] = []
        for _ in _PER_COLUMN:
            views.append([words[at + k * num_slots : at + (k + 1) * num_slots] for k in range(num_processes)])
            at += num_processes * num_slots
        self.in_flight, self.requests, self.failures, self.heard = views
        slots = [words[at + k * num_slots : at + (k + 1) * num_slots] for k in range(len(_PER_SLOT))]
        self.turn, self.is_open, self.in_a_row, self.try_at, self.trial_by = slots

    @classmethod
    def create(cls, *, num_processes: int, num_slots: int) -> "SharedMemory":
        """All zeros. The descriptor can be handed to children."""
        fd = os.memfd_create("furlong-router", os.MFD_CLOEXEC)
        os.ftruncate(fd, _size_bytes(num_processes, num_slots))
        return cls(fd, num_processes=num_processes, num_slots=num_slots)

    @property
    def breakers_changed(self) -> int:
        """When a breaker last opened or closed."""
        return self._words[0]

    @breakers_changed.setter
    def breakers_changed(self, at: int) -> None:
        self._words[0] = at

    def waiting(self, column: int) -> int:
        """Requests that wait in a process."""
        return self._words[LINE_WORDS * (1 + column) + _WAITING]

    def waiting_of(self, column: int) -> "memoryview[int]":
        """The same, as one number to be looked at often."""
        at = LINE_WORDS * (1 + column) + _WAITING
        return self._words[at : at + 1]

    def waiting_since(self, column: int) -> int:
        """Since when the first of them waits that any worker would do for, in nanoseconds; 0: there is none."""
        return self._words[LINE_WORDS * (1 + column) + _SINCE]

    def set_waiting(self, column: int, number: int, since: int) -> None:
        """Tell the others who waits here."""
        at = LINE_WORDS * (1 + column)
        self._words[at + _SINCE] = since
        self._words[at + _WAITING] = number

    def closed(self, column: int) -> int:
        """Connections of clients that ended in a process, of all that it was ever given."""
        return self._words[LINE_WORDS * (1 + column) + _CLOSED]

    def add_closed(self, column: int) -> None:
        """One more ended."""
        self._words[LINE_WORDS * (1 + column) + _CLOSED] += 1

    def sum_of(self, columns: list["memoryview[int]"], slot: int) -> int:
        """Over all processes."""
        total = 0
        for column in columns:
            total += column[slot]
        return total

    @contextlib.contextmanager
    def locked(self, slot: int) -> Generator[None]:
        """No other process is inside for this slot. What is done there must not wait, nor lock again."""
        self.lock(slot)
        try:
            yield
        finally:
            self.unlock(slot)

    def lock(self, slot: int) -> None:
        """See `locked`."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except BlockingIOError:
            self._wait_for_lock(slot)

    def unlock(self, slot: int) -> None:
        """See `locked`."""
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, slot)

    def _wait_for_lock(self, slot: int) -> None:
        """Until it is free. A secondary that holds it for too long is ended; the primary is waited for, since without
        it there is no router."""
        deadline = time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                return
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
            if time.monotonic() > deadline:
                deadline += LOCK_LIMIT_S
                holder = self._holder(slot)
                if holder not in (0, os.getppid()):  # the parent of a secondary is the primary
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(holder, signal.SIGKILL)

    def _holder(self, slot: int) -> int:
        """The process that holds a slot's lock; 0: none."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else max(pid, 0)

    def clear_slot(self, slot: int) -> None:
        """Begin a slot anew. Only when nobody uses it."""
        for views in (self.in_flight, self.requests, self.failures, self.heard):
            for view in views:
                view[slot] = 0
        for view in (self.turn, self.is_open, self.in_a_row, self.try_at, self.trial_by):
            view[slot] = 0

    def take_back(self, column: int, *, heir: int) -> int:
        """Clear the column of a process that is no more; how many requests it had in flight.

        heir: the column that its totals go to, which is the caller's own: totals never fall.
        """
        self.set_waiting(column, 0, 0)
        self._words[LINE_WORDS * (1 + column) + _CLOSED] = 0
        lost = 0
        for slot in range(self.num_slots):
            lost += self.in_flight[column][slot]
            self.in_flight[column][slot] = 0
            for views in (self.requests, self.failures):
                if views[column][slot]:
                    views[heir][slot] += views[column][slot]
                    views[column][slot] = 0
            if self.trial_by[slot] == column + 1:
                self.trial_by[slot] = 0
        return lost


def _size_bytes(num_processes: int, num_slots: int) -> int:
    num_views = len(_PER_COLUMN) * num_processes + len(_PER_SLOT)
    return WORD_BYTES * (LINE_WORDS * (1 + num_processes) + num_views * num_slots)
