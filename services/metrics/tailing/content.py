"""How a file's content is recognised: by what was read of it, since names and inode numbers are given away again.

The first and the last bytes that were read tell, in two small reads, whether a file is still the one that was read so
far. A checksum of everything that was read tells whether another file is a copy of it. Never writes.
"""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

HEAD_BYTES = 256
ANCHOR_BYTES = 64
_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Content:
    """What was read of a file, from its beginning."""

    offset: int = 0
    checksum: int = 0
    """CRC-32 of all of it."""
    head: bytes = b""
    anchor: bytes = b""
    """The last bytes."""

    def plus(self, more: bytes) -> "Content":
        """With what came after it."""
        if not more:
            return self
        return replace(
            self,
            offset=self.offset + len(more),
            checksum=zlib.crc32(more, self.checksum),
            head=self.head if len(self.head) == HEAD_BYTES else (self.head + more)[:HEAD_BYTES],
            anchor=(self.anchor + more)[-ANCHOR_BYTES:],
        )

    def still_begins(self, fd: int) -> bool:
        """Whether a file begins with it, as far as two small reads can tell."""
        return (
            os.pread(fd, len(self.head), 0) == self.head
            and os.pread(fd, len(self.anchor), self.offset - len(self.anchor)) == self.anchor
        )

    def begins(self, fd: int) -> bool:
        """Whether a file begins with it: all of it is read."""
        if not self.offset or not self.still_begins(fd):
            return False
        checksum, at = 0, 0
        while at < self.offset:
            chunk = os.pread(fd, min(_CHUNK_BYTES, self.offset - at), at)
            if not chunk:
                return False
            checksum, at = zlib.crc32(chunk, checksum), at + len(chunk)
        return checksum == self.checksum

    def dump(self) -> dict[str, object]:
        """For a mark: no byte of the file itself stands in it."""
        return {
            "offset": self.offset,
            "checksum": self.checksum,
            "head": [len(self.head), _digest(self.head)],
            "anchor": [len(self.anchor), _digest(self.anchor)],
        }


@dataclass(frozen=True, slots=True)
class KnownContent:
    """The same, as a mark has it."""

    offset: int
    checksum: int
    head_size: int
    head_digest: str
    anchor_size: int
    anchor_digest: str

    @classmethod
    def load(cls, dumped: Mapping[str, object]) -> "KnownContent":
        """Raises KeyError, TypeError, ValueError when it is no such dump."""
        head, anchor = dumped["head"], dumped["anchor"]
        if not isinstance(head, list) or not isinstance(anchor, list):
            raise TypeError("head and anchor must be lists")
        offset, checksum = int(str(dumped["offset"])), int(str(dumped["checksum"]))
        return cls(offset, checksum, int(head[0]), str(head[1]), int(anchor[0]), str(anchor[1]))

    def find_in(self, fd: int) -> Content | None:
        """The content, when the file still begins with it, as far as two small reads can tell."""
        if self.anchor_size > self.offset:
            return None
        head = os.pread(fd, self.head_size, 0)
        anchor = os.pread(fd, self.anchor_size, self.offset - self.anchor_size)
        if _digest(head) != self.head_digest or _digest(anchor) != self.anchor_digest:
            return None
        return Content(self.offset, self.checksum, head, anchor)


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
