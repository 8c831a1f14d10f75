"""One file that is followed: what was read of it, what waits, and how to go on. Never blocks on the file.

`read` looks after each read whether the file is still the one that was read so far; if it is not, what was read is
given back. A file that was cut and has grown again past the old place is found by that, too.
"""

import datetime
import os
from dataclasses import dataclass, field

import orjson

from services.metrics.tailing.content import Content, KnownContent
from services.metrics.tailing.records import Counts, LineReader, OnText
from services.metrics.tailing.splitter import Splitter
from services.metrics.tailing.tracebacks import Joiner

HALF_LINE_S = 5.0
"""A line without an end is handed out as it is after so much silence."""
_RACY_S = 0.05
"""Two writes within so much may leave the same time of change."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One look at all files."""

    now: datetime.datetime
    """In UTC."""
    mono_s: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A file's state in the store."""

    path: str
    dev: int
    ino: int
    content: KnownContent
    skipping: bool
    continued: bool
    open: list[dict[str, object]]
    counts: dict[str, int]
    saved_s: int
    body: bytes
    """As it is in the store."""

    @property
    def name(self) -> str:
        """Its name in the store."""
        return mark_name(self.dev, self.ino)

    def without_open(self) -> bytes:
        """The same, once its tracebacks were handed out."""
        return orjson.dumps({**orjson.loads(self.body), "open": []})

    @classmethod
    def load(cls, body: bytes) -> "Mark | None":
        """None: it cannot be read."""
        try:
            given = orjson.loads(body)
            content = KnownContent.load(given["content"])
            names = ("path", "dev", "ino", "skipping", "continued", "open", "counts", "saved_s")
            return cls(content=content, body=body, **{name: given[name] for name in names})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return None


def mark_name(dev: int, ino: int) -> str:
    """The name of a file's mark."""
    return f"tail/{dev:x}:{ino:x}"


@dataclass
class FollowedFile:
    """An open file and the place in it. All that is read goes through `read`, in order."""

    path: str
    fd: int
    dev: int
    ino: int
    reader: LineReader
    content: Content = field(default_factory=Content)
    splitter: Splitter = field(default_factory=Splitter)
    is_attached: bool = True
    """Its name is still among those that are followed."""
    is_dirty: bool = True
    """Its mark in the store is older than its state."""
    grew_s: float = 0.0
    size_bytes: int = 0
    _seen: tuple[int, int] = (-1, -1)
    _seen_racy: bool = True

    @classmethod
    def open(cls, path: str, *, run: str, on_text: OnText, mono_s: float) -> "FollowedFile":
        """From its beginning. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its writer
        stat = os.fstat(fd)
        reader = LineReader(path, run, on_text)
        return cls(path, fd, stat.st_dev, stat.st_ino, reader, grew_s=mono_s, size_bytes=stat.st_size)

    def restore(self, mark: Mark, content: Content, mono_s: float) -> None:
        """Go on where a mark says, under the name that the file was found by."""
        self._rename(mark.path)
        self.content = content
        self.splitter = Splitter(skipping=mark.skipping, continued=mark.continued)
        self.reader.counts = Counts.from_dict(mark.counts)
        self.reader.joiner.load(mark.open, mono_s)

    def take_over(self, other: "FollowedFile") -> None:
        """Go on where another file was: this one begins with all that was read of it."""
        self._rename(other.path)
        self.content, self.reader.joiner = other.content, other.reader.joiner
        self.splitter = Splitter(skipping=other.splitter.skipping, continued=other.splitter.continued)
        other.reader.joiner = Joiner()
        self.is_dirty = True

    def read(self, limit: int, moment: Moment) -> tuple[list[bytes], int] | None:
        """New records and how many bytes were read; None: its content is not what was read so far."""
        stat = os.fstat(self.fd)
        self.size_bytes = stat.st_size
        at = self.content.offset + len(self.splitter.buffer)
        seen = (stat.st_size, stat.st_mtime_ns)
        if seen == self._seen and not self._seen_racy and stat.st_size == at:
            return [], 0
        self._seen = seen
        self._seen_racy = moment.now.timestamp() - stat.st_mtime < _RACY_S
        if stat.st_size < at:
            return None
        chunk = os.pread(self.fd, limit, at) if stat.st_size > at else b""
        if not self._is_same():
            return None
        if not chunk:
            return [], 0
        self.grew_s, self.is_dirty = moment.mono_s, True
        lines, done = self.splitter.feed(chunk)
        self.content = self.content.plus(done)
        self.reader.counts.bytes += len(chunk)
        return self.reader.read(lines, now=moment.now, now_s=moment.mono_s), len(chunk)

    def settle(self, moment: Moment) -> list[bytes]:
        """What has waited long enough for its end."""
        bodies = self.reader.close_idle(moment.mono_s) if self.reader.joiner.open else []
        if self.splitter.buffer and moment.mono_s - self.grew_s >= HALF_LINE_S:
            bodies += self.flush_half_line(moment)
        self.is_dirty |= bool(bodies)
        return bodies

    def flush_half_line(self, moment: Moment) -> list[bytes]:
        """What waits for its newline, as it is. Whatever of it comes later is a record of its own, marked so."""
        lines, done = self.splitter.flush()
        self.content = self.content.plus(done)
        self.is_dirty |= bool(done)
        return self.reader.read(lines, now=moment.now, now_s=moment.mono_s)

    def flush(self, moment: Moment) -> list[bytes]:
        """All that waits."""
        bodies = self.flush_half_line(moment) + self.reader.close_all()
        self.is_dirty |= bool(bodies)
        return bodies

    def begin_anew(self) -> None:
        """Its content was replaced; what was in it is done with."""
        self.content, self.splitter = Content(), Splitter()
        self.reader.counts.truncations += 1
        self.is_dirty = True

    def dump(self, moment: Moment) -> bytes:
        """Its mark."""
        self.is_dirty = False
        return orjson.dumps(
            {
                "path": self.path,
                "dev": self.dev,
                "ino": self.ino,
                "content": self.content.dump(),
                "skipping": self.splitter.skipping,
                "continued": self.splitter.continued,
                "open": self.reader.joiner.dump(),
                "counts": self.reader.dump_counts(),
                "saved_s": int(moment.now.timestamp()),
            },
        )

    @property
    def seen(self) -> Content:
        """What was read, with the half line that waits."""
        return self.content.plus(self.splitter.buffer)

    @property
    def behind_bytes(self) -> int:
        """Bytes that are not read yet."""
        return max(0, self.size_bytes - self.content.offset - len(self.splitter.buffer))

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)

    def _rename(self, path: str) -> None:
        self.path = path
        self.reader = LineReader(path, self.reader.run, self.reader.on_text)

    def _is_same(self) -> bool:
        waiting = self.splitter.buffer[:4096]
        return self.content.still_begins(self.fd) and os.pread(self.fd, len(waiting), self.content.offset) == waiting
