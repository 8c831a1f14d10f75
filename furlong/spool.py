"""Records on disk while the metrics service is away: bounded, in order, readable after its writer was killed.

A spool is the files INSTANCE-INCARNATION.NNNNNN.spool of one producer, held by a lock that the kernel lets go of when
the producer ends; then the producer's next start, or the metrics service, takes the files over and delivers them under
the producer's own numbers. A full spool drops debug and info lines first, metrics last; a dropped record leaves its
number. A damaged file is set aside under another name, never deleted.
"""

import contextlib
import fcntl
import glob
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from weakref import WeakSet

from furlong.recordqueue import Priority, Record
from furlong.spoolfile import FRAME, MAX_INTEGER, frames, head_of, parse, producer_in

_FILE = re.compile(r"^(?P<stem>.+-\d+)\.(?P<number>\d{6,})\.spool$")
_MAX_SEGMENT_BYTES = 1024 * 1024  # read, and rewritten, in one go
_LOCK_TRIES = 50


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one producer."""

    producer: str
    incarnation: int
    first_sequence: int
    records: tuple[Record, ...]

    @property
    def last_sequence(self) -> int:
        return self.first_sequence + len(self.records) - 1

    @cached_property
    def size_bytes(self) -> int:
        return sum([len(record.body) for record in self.records])


@dataclass
class _Segment:
    path: Path
    first: int
    last: int
    size_bytes: int
    bytes_by_priority: list[int] = field(default_factory=lambda: [0, 0, 0])


class Spool:
    """One producer's files. One thread."""

    def __init__(self, folder: Path, instance: str, *, producer: str, incarnation: int, max_bytes: int) -> None:
        self.producer, self.incarnation = producer, incarnation
        self._instance, self.stem = instance, f"{instance}-{incarnation}"
        self.num_dropped = [0, 0, 0]
        self.num_damaged = 0
        self._folder, self._max_bytes = folder, max_bytes
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, max(4096, max_bytes // 8))
        self._segments: list[_Segment] = []
        self._next_number = 0
        self._open: int | None = None
        self._lock: int | None = None
        self._read_through = 0
        self._loaded: tuple[Path | None, list[tuple[int, Record]]] = (None, [])
        _spools.add(self)

    def ascend(self) -> None:
        """Make this start's number larger than that of any before it, also when the clock was set back between them.

        The last number is kept in a file beside the spools. Before anything is numbered. Never raises: where the file
        cannot be written, the clock has to do.
        """
        with contextlib.suppress(OSError), _locked_number(self._folder / f"{self._instance}.incarnation") as number:
            last = number.read()
            self.incarnation = max(self.incarnation, last + 1)
            self.stem = f"{self._instance}-{self.incarnation}"
            number.write(self.incarnation)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def is_empty(self) -> bool:
        """Whether everything was acknowledged."""
        return not self._segments

    @property
    def has_unread(self) -> bool:
        return bool(self._segments) and self._segments[-1].last > self._read_through

    def append(self, batch: Batch, *, is_read: bool = False) -> None:
        """Store a batch that follows those before. Raises OSError (a full disk); then nothing of it is stored.

        is_read: it was sent already; it is read again only after `rewind`.
        """
        if self._lock is None and not self._take_lock():
            raise OSError(f"the spool {self.stem} is held by another process")
        numbered = self._make_room(list(enumerate(batch.records, batch.first_sequence)))
        content = b"".join(frames(numbered))
        if self._open is None or self._segments[-1].size_bytes + len(content) > self._segment_bytes:
            self._begin_segment(batch.first_sequence)
        segment = self._segments[-1]
        handle = self._open
        if handle is None:  # for the type checker: a segment was begun
            raise OSError("no open segment")
        if _write_all(handle, content) < len(content):
            os.ftruncate(handle, segment.size_bytes)
            if segment.size_bytes == 0 or segment.last < segment.first:
                self._forget(segment)
            raise OSError("the disk took only a part of the batch")
        segment.size_bytes += len(content)
        segment.last = batch.last_sequence
        for _, record in numbered:
            segment.bytes_by_priority[record.priority] += len(record.body)
        if is_read:
            self._read_through = batch.last_sequence

    def read(self, *, max_records: int, max_bytes: int) -> Batch | None:
        """The next records, not yet read since the start or since `rewind`. None: there are none."""
        while self.has_unread:
            segment = next(s for s in self._segments if s.last > self._read_through)
            if segment is self._segments[-1]:
                self._end_segment()  # what is read is no longer written to
            items = self._load(segment)
            start = bisect_right(items, self._read_through, key=itemgetter(0))
            waiting = items[start : start + max_records]
            if not waiting:  # damaged: what it said to hold is not there
                self._read_through = segment.last
                continue
            first = waiting[0][0]
            taken: list[Record] = []
            size = 0
            for sequence, record in waiting:
                if (taken and size + len(record.body) > max_bytes) or sequence != first + len(taken):
                    break
                taken.append(record)
                size += len(record.body)
            self._read_through = first + len(taken) - 1
            return Batch(self.producer, self.incarnation, first, tuple(taken))
        return None

    def rewind(self) -> None:
        """Read again from the first record that is not acknowledged."""
        self._read_through = self._segments[0].first - 1 if self._segments else self._read_through

    def acknowledge(self, through_sequence: int) -> None:
        """Remove what is delivered. Only whole files go; the rest is delivered again after a crash, and known there."""
        while self._segments and self._segments[0].last <= through_sequence:
            self._forget(self._segments[0])
        if not self._segments:
            self.release()

    def release(self) -> None:
        """Let go of the files; without any left, of the lock's file too."""
        self._end_segment()
        if self._lock is not None:
            if not self._segments:
                with contextlib.suppress(OSError):  # a folder that takes no changes: it is in nobody's way
                    self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    # -- files

    @property
    def _lock_path(self) -> Path:
        return self._folder / f"{self.stem}.lock"

    def _take_lock(self) -> bool:
        """Whether the files are ours now. The lock's file may be removed by who held it last: then try once more."""
        for _ in range(8):
            handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_ino == self._lock_path.stat().st_ino:
                    self._lock = handle
                    return True
            except BlockingIOError:
                os.close(handle)
                return False
            except FileNotFoundError:
                pass
            os.close(handle)
        return False

    def _begin_segment(self, first_sequence: int) -> None:
        self._end_segment()
        path = self._folder / f"{self.stem}.{self._next_number:06d}.spool"
        head = head_of(self.producer, self.incarnation)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _write_all(handle, head) < len(head):
            os.close(handle)
            path.unlink(missing_ok=True)
            raise OSError("the disk is full")
        self._open = handle
        self._next_number += 1
        self._segments.append(_Segment(path, first_sequence, first_sequence - 1, len(head)))

    def _end_segment(self) -> None:
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def _forget(self, segment: _Segment) -> None:
        if segment is self._segments[-1]:
            self._end_segment()
        self._segments.remove(segment)
        with contextlib.suppress(OSError):  # what stays is delivered again after a restart, and known there
            segment.path.unlink(missing_ok=True)

    def _load(self, segment: _Segment) -> list[tuple[int, Record]]:
        if self._loaded[0] != segment.path:
            head, items, intact = parse(segment.path)
            if not intact:
                self._set_aside(segment.path)
            self._loaded = (segment.path, items if head else [])
        return self._loaded[1]

    def _set_aside(self, path: Path) -> None:
        """Keep a copy of a damaged file; what is whole in it is delivered all the same."""
        self.num_damaged += 1
        with contextlib.suppress(OSError):
            os.link(path, path.with_suffix(".damaged"))

    # -- the bound

    def _make_room(self, numbered: list[tuple[int, Record]]) -> list[tuple[int, Record]]:
        for priority in Priority:
            if self._fits(numbered):
                break
            self._evict(priority, numbered)
            if not self._fits(numbered) and priority is not Priority.METRICS:
                self.num_dropped[priority] += sum(r.priority == priority and bool(r.body) for _, r in numbered)
                numbered = [(n, _emptied(r) if r.priority == priority else r) for n, r in numbered]
        return numbered

    def _fits(self, numbered: Sequence[tuple[int, Record]]) -> bool:
        incoming = sum(len(record.body) + FRAME.size for _, record in numbered)
        return self.size_bytes + incoming <= self._max_bytes

    def _evict(self, priority: Priority, numbered: Sequence[tuple[int, Record]]) -> None:
        """Drop stored records of one priority, oldest files first, until the incoming ones fit."""
        for segment in list(self._segments):
            if self._fits(numbered):
                return
            if segment.bytes_by_priority[priority]:
                if segment is self._segments[-1]:
                    self._end_segment()
                self._rewrite_without(segment, priority)

    def _rewrite_without(self, segment: _Segment, priority: Priority) -> None:
        head, items, _ = parse(segment.path)
        self.num_dropped[priority] += sum(r.priority == priority and bool(r.body) for _, r in items)
        kept = [(n, _emptied(r) if r.priority == priority else r) for n, r in items]
        content = head + b"".join(frames(kept))
        scratch = segment.path.with_suffix(".tmp")
        scratch.write_bytes(content)
        scratch.replace(segment.path)
        segment.size_bytes = len(content)
        segment.bytes_by_priority[priority] = 0
        if self._loaded[0] == segment.path:
            self._loaded = (None, [])


class _Number:
    """A number in a file of fixed width, so that writing it anew cannot cut it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def read(self) -> int:
        text = os.pread(self._handle, 32, 0).strip()
        number = int(text) if text.isdigit() else 0
        return number if number < MAX_INTEGER - 1 else 0

    def write(self, number: int) -> None:
        content = b"%020d\n" % number
        os.pwrite(self._handle, content, 0)
        os.ftruncate(self._handle, len(content))


@contextlib.contextmanager
def _locked_number(path: Path) -> Iterator[_Number]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # another process of this name starts; one that was stopped there is not waited for
                time.sleep(0.01)
        yield _Number(handle)
    finally:
        os.close(handle)


_spools: WeakSet[Spool] = WeakSet()


def left_over(folder: Path, *, instance: str | None = None) -> list[Spool]:
    """The spools that nobody holds, taken over: of one instance, or of all. Oldest first. Never raises: one that the
    disk does not let us take is left for later."""
    found: list[Spool] = []
    for stem in _stems(folder):
        if instance is None or stem.rpartition("-")[0] == instance:
            with contextlib.suppress(OSError):
                taken = _take_over(folder, stem)
                if taken is not None:
                    found.append(taken)
    return found


def waiting(folder: Path) -> dict[str, int]:
    """How many records wait on disk, by instance. Only looks: acknowledged ones whose file is still used count too."""
    found: dict[str, int] = {}
    for stem in _stems(folder):
        instance = stem.rpartition("-")[0]
        for path in _paths(folder, stem):
            num_records = sum(bool(record.body) for _, record in parse(path)[1])
            if num_records:
                found[instance] = found.get(instance, 0) + num_records
    return found


def _stems(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    stems = {match["stem"] for name in names if (match := _FILE.match(name))}
    numbered = [(int(stem.rpartition("-")[2]), stem) for stem in stems]
    return [stem for incarnation, stem in sorted(numbered) if 1 <= incarnation <= MAX_INTEGER]


def _paths(folder: Path, stem: str) -> list[Path]:
    """The files of a spool, oldest first."""
    found = [match for path in folder.glob(f"{glob.escape(stem)}.*") if (match := _FILE.match(path.name))]
    return [folder / match.string for match in sorted(found, key=lambda match: int(match["number"]))]


def _take_over(folder: Path, stem: str) -> Spool | None:
    instance, _, incarnation = stem.rpartition("-")
    spool = Spool(folder, instance, producer="", incarnation=int(incarnation), max_bytes=1 << 62)
    if not spool._take_lock():
        return None
    for path in filter(Path.is_file, _paths(folder, stem)):
        head, items, intact = parse(path)
        if not intact:
            spool._set_aside(path)
        if not head or not items:
            if head or not intact:
                path.unlink(missing_ok=True)
            continue
        spool.producer = producer_in(head)
        spool._segments.append(_Segment(path, items[0][0], items[-1][0], path.stat().st_size))
    if spool.is_empty:
        spool.release()
        return None
    spool.rewind()
    return spool


def _emptied(record: Record) -> Record:
    return Record(record.priority, b"")


def _write_all(handle: int, content: bytes) -> int:
    """How much of it the disk took."""
    done = 0
    with contextlib.suppress(OSError):
        while done < len(content):
            done += os.write(handle, content[done:])
    return done


def _in_forked_child() -> None:
    """The parent's files and lock are the parent's."""
    for spool in list(_spools):
        for handle in (spool._lock, spool._open):
            if handle is not None:
                os.close(handle)
        spool._lock = spool._open = None
        spool._segments = []


os.register_at_fork(after_in_child=_in_forked_child)
