"""The files that are followed together: finds new ones, tells renamed from replaced, copies from originals.

A file is known by its device and inode, and by its content, since both numbers are given away again. It never hands
out a line twice: the state of each file is a mark that is saved together with the records made of it.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from services.metrics.tailing.followed import FollowedFile, Mark, Moment, mark_name
from services.metrics.tailing.marks import MIN_CONTINUED_BYTES, Key, Marks, path_of_inode, related_paths
from services.metrics.tailing.patterns import expand, is_related
from services.metrics.tailing.records import OnText

log = structlog.get_logger()

MAX_FILES = 1_000
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Bytes of half lines that all files together may hold."""
READ_BYTES = 64 * 1024
COPY_WAIT_S = 10.0
"""A file that looks like a copy of a followed one is left alone for so long: then it is a file of its own."""
LINGER_S = 30.0
"""A file that was renamed away is read on for so long after its last line, once there is another in its place."""
GONE_LINGER_S = 2.0
"""The same, for one that was removed."""
_COMPARED_BYTES = 64 * 1024
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass
class Batch:
    """Records, and the marks to save in the same commit. None: the mark is to be removed."""

    bodies: list[bytes] = field(default_factory=list)
    marks: dict[str, bytes | None] = field(default_factory=dict)
    size_bytes: int = 0

    def add(self, bodies: list[bytes]) -> None:
        self.bodies += bodies
        self.size_bytes += sum(map(len, bodies))


@dataclass
class _Candidate:
    """A new file that may be a copy of one that is followed."""

    file: FollowedFile
    size_bytes: int
    since_s: float


class Follower:
    """Used by one thread."""

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        run: str,
        marks: Mapping[str, bytes],
        is_own: Callable[[str], bool] = lambda path: False,
        on_text: OnText = lambda instance, line: None,
    ) -> None:
        """is_own: whether a file is written by the service itself: to follow it would never end."""
        self.files: dict[Key, FollowedFile] = {}
        self._patterns, self._run, self._is_own, self._on_text = patterns, run, is_own, on_text
        self._candidates: dict[Key, _Candidate] = {}
        self._marks = Marks(marks, run=run)
        self._is_first = True
        self._said: set[tuple[str, str]] = set()
        self._failed_until_s: dict[str, float] = {}
        self._turn = 0

    def discover(self, moment: Moment, batch: Batch) -> None:
        """Look which files there are now."""
        found = expand(self._patterns)
        at = {path: (stat.st_dev, stat.st_ino) for path, stat in found.items()}
        keys = set(at.values())
        for file in self.files.values():
            file.is_attached = (file.dev, file.ino) in keys
        for path, key in sorted(at.items(), key=lambda item: (len(item[0]), item)):  # originals before copies
            if key not in self.files and key not in self._candidates:
                self._meet(path, key, moment, batch)
        if self._is_first:
            self._is_first = False
            self._restore_missing(moment, batch)
        self._judge_candidates(moment, keys)
        self._close_gone(moment, batch, set(at))

    def read(self, moment: Moment, batch: Batch, *, max_bytes: int) -> bool:
        """Add what is new to a batch; whether there is more. Each file gets its turn."""
        files = list(self.files.values())
        more = False
        for index in range(len(files)):
            if batch.size_bytes >= max_bytes:
                self._turn = (self._turn + index) % len(files)
                more = True
                break
            more |= self._read_one(files[(self._turn + index) % len(files)], moment, batch)
        self._bound_waiting(moment, batch)
        self.collect_marks(moment, batch)
        return more

    def finish(self, moment: Moment, batch: Batch) -> None:
        """Hand out what waits, half as it is; for the end of the service."""
        for file in self.files.values():
            batch.add(file.flush(moment))
        self.collect_marks(moment, batch)

    def collect_marks(self, moment: Moment, batch: Batch) -> None:
        """Put the marks of what changed into a batch."""
        batch.marks.update(self._marks.dropped)
        self._marks.dropped.clear()
        for file in self.files.values():
            if file.is_dirty:
                batch.marks[mark_name(file.dev, file.ino)] = file.dump(moment)

    def close(self) -> None:
        """Close all files."""
        for file in [*self.files.values(), *(candidate.file for candidate in self._candidates.values())]:
            file.close()
        self.files.clear()
        self._candidates.clear()

    def _read_one(self, file: FollowedFile, moment: Moment, batch: Batch) -> bool:
        try:
            got = file.read(READ_BYTES, moment)
        except OSError as error:  # a disk or a network file system that fails; the place is kept
            self._say("tail_read_failed", file.path, error=str(error))
            return False
        if got is None:
            self._replaced(file, moment, batch)
            return True
        bodies, size = got
        batch.add(bodies)
        batch.size_bytes += size // 8  # lines that give no record take time, too
        if not size:
            batch.add(file.settle(moment))
        return size > 0

    def _replaced(self, file: FollowedFile, moment: Moment, batch: Batch) -> None:
        """Its content is new: look for a copy that has the rest of the old one, then begin anew."""
        copy = self._copy_of(file, moment)
        log.info("tail_file_truncated", file=file.path, read_bytes=file.content.offset, copy=copy.path if copy else "")
        if copy is None:
            batch.add(file.flush(moment))
        else:
            copy.take_over(file)
            self.files[copy.dev, copy.ino] = copy
            self._candidates.pop((copy.dev, copy.ino), None)
        file.begin_anew()

    def _copy_of(self, file: FollowedFile, moment: Moment) -> FollowedFile | None:
        """A file beside it that begins with all that was read of it, and that is not followed."""
        for path in related_paths(file.path):
            try:
                ino = os.stat(path).st_ino
            except OSError:
                continue
            if (file.dev, ino) in self.files:
                continue
            candidate = self._candidates.get((file.dev, ino))
            other = candidate.file if candidate else self._open(path, moment)
            if other is None:
                continue
            if _begins(other, file):
                return other
            if candidate is None:
                other.close()
        return None

    def _meet(self, path: str, key: Key, moment: Moment, batch: Batch) -> None:
        """A file that is not followed yet."""
        if self._is_own(path):
            self._say("tail_skips_own_file", path)
            return
        if len(self.files) >= MAX_FILES:
            self._say("tail_too_many_files", path, limit=MAX_FILES)
            return
        file = self._open(path, moment)
        if file is None:
            return
        if os.pread(file.fd, 2, 0) in _UTF16:
            self._say("tail_skips_utf16", path, remedy="Write it as UTF-8.")
            file.close()
            return
        key = (file.dev, file.ino)  # another file may have taken the name since
        if key in self.files or key in self._candidates:
            file.close()
            return
        if not self._restore(file, moment, batch) and self._may_be_copy(file):
            self._candidates[key] = _Candidate(file, file.size_bytes, moment.mono_s)
            return
        self.files[key] = file
        log.info("tail_file_found", file=path, offset=file.content.offset)

    def _restore(self, file: FollowedFile, moment: Moment, batch: Batch) -> bool:
        """Go on where its mark, or that of the file that it took the place of, says."""
        mark = self._marks.take_of(file)
        if mark is None:
            return self._continues_another(file, moment)
        content = mark.content.find_in(file.fd)
        if content is not None and content.offset:  # nothing read is no sign that it is the same file
            file.restore(mark, content, moment.mono_s)
            return True
        if not self._continue_in_copy(mark, moment):
            batch.add(self._marks.open_lines(mark))
        return False

    def _continue_in_copy(self, mark: Mark, moment: Moment) -> bool:
        """The file was cut while nobody looked: the rest of what it had may be in a copy beside it."""
        for path in related_paths(mark.path):
            other = self._open(path, moment)
            if other is None:
                continue
            key = (other.dev, other.ino)
            is_free = key not in self.files and key not in self._candidates and not self._marks.is_of(other)
            content = mark.content.find_in(other.fd) if is_free else None
            if content is not None and content.begins(other.fd):
                other.restore(mark, content, moment.mono_s)
                self._marks.discard(other)
                self.files[key] = other
                return True
            other.close()
        return False

    def _continues_another(self, file: FollowedFile, moment: Moment) -> bool:
        """A program that writes a file anew and renames it into place, with the old lines at its beginning."""
        for key, other in self.files.items():
            same_place = other.path == file.path and not other.is_attached
            if same_place and other.content.offset >= MIN_CONTINUED_BYTES and _begins(file, other):
                file.take_over(other)
                self._drop(key)
                return True
        found = self._marks.take_gone(file)
        if found is not None:
            file.restore(*found, moment.mono_s)
        return found is not None

    def _restore_missing(self, moment: Moment, batch: Batch) -> None:
        """Files that were renamed to other names while nobody looked."""
        for mark in self._marks.waiting():
            path = path_of_inode(mark)
            file = self._open(path, moment) if path else None
            content = mark.content.find_in(file.fd) if file is not None else None
            if file is not None and content is not None and (file.dev, file.ino) not in self.files:
                file.restore(mark, content, moment.mono_s)
                file.is_attached = False
                self.files[file.dev, file.ino] = file
                self._marks.discard(file)
                continue
            if file is not None:
                file.close()
            bodies, kept = self._marks.give_up(mark, moment)
            batch.add(bodies)
            if kept is not None:
                batch.marks[mark.name] = kept

    def _drop(self, key: Key) -> None:
        file = self.files.pop(key)
        self._marks.dropped[mark_name(*key)] = None
        file.close()

    def _may_be_copy(self, file: FollowedFile) -> bool:
        """Whether a file beside it has the same beginning, and more."""
        folder, name = os.path.split(file.path)
        mine = os.pread(file.fd, _COMPARED_BYTES, 0)
        size = os.fstat(file.fd).st_size
        for other in self.files.values():
            beside, original = os.path.split(other.path)
            if mine and other is not file and beside == folder and is_related(original, name):
                theirs = os.pread(other.fd, len(mine), 0)
                if theirs == mine and os.fstat(other.fd).st_size >= size:
                    return True
        return False

    def _judge_candidates(self, moment: Moment, keys: set[Key]) -> None:
        for key, candidate in list(self._candidates.items()):
            file = candidate.file
            size = os.fstat(file.fd).st_size
            file.size_bytes = size
            if size != candidate.size_bytes:
                candidate.size_bytes, candidate.since_s = size, moment.mono_s
            waited = moment.mono_s - candidate.since_s >= COPY_WAIT_S
            if waited or not self._may_be_copy(file):
                del self._candidates[key]
                self.files[key] = file
            elif key not in keys:
                del self._candidates[key]
                file.close()

    def _close_gone(self, moment: Moment, batch: Batch, paths: Iterable[str]) -> None:
        """Close files that were renamed away or removed, once they have been silent."""
        there = set(paths)
        for key, file in list(self.files.items()):
            if file.is_attached or file.behind_bytes:
                continue
            is_removed = os.fstat(file.fd).st_nlink == 0
            silent_s = moment.mono_s - file.grew_s
            if (is_removed and silent_s >= GONE_LINGER_S) or (file.path in there and silent_s >= LINGER_S):
                batch.add(file.flush(moment))
                self._drop(key)
                log.info("tail_file_left", file=file.path, removed=is_removed, **file.reader.dump_counts())

    def _bound_waiting(self, moment: Moment, batch: Batch) -> None:
        while sum(len(file.splitter.buffer) for file in self.files.values()) > MAX_WAITING_BYTES:
            largest = max(self.files.values(), key=lambda file: len(file.splitter.buffer))
            batch.add(largest.flush_half_line(moment))

    def _open(self, path: str, moment: Moment) -> FollowedFile | None:
        if self._failed_until_s.get(path, 0.0) > moment.mono_s:
            return None
        try:
            file = FollowedFile.open(path, run=self._run, on_text=self._on_text, mono_s=moment.mono_s)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failed_until_s[path] = moment.mono_s + 1.0
            self._say("tail_open_failed", path, error=error.strerror or str(error))
            return None
        self._failed_until_s.pop(path, None)
        self._said.discard(("tail_open_failed", path))
        return file

    def _say(self, event: str, path: str, **more: object) -> None:
        """Once a file."""
        if (event, path) not in self._said and len(self._said) < 10 * MAX_FILES:
            self._said.add((event, path))
            log.warning(event, file=path, **more)


def _begins(file: FollowedFile, other: FollowedFile) -> bool:
    """Whether it begins with all that was read of the other one."""
    try:
        return other.seen.begins(file.fd)
    except OSError:
        return False
