"""A spool's file: a head that says whose it is, and a frame a record. Knows no folder, lock or bound.

A frame names its record's sequence number and carries a checksum; records that were dropped leave their numbers.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from furlong.recordqueue import Priority, Record

FRAME = struct.Struct("<QBII")
"""Sequence, priority, length, crc32 of the body."""
MAX_INTEGER = 2**63 - 1
_MAGIC = b"furlong-spool-1 "
_COUNT = struct.Struct("<I")
_DROPPED = 255  # priority of a frame that stands for so many dropped records
_MAX_BODY_BYTES = 64 * 1024 * 1024


def head_of(producer: str, incarnation: int) -> bytes:
    """The first line of a producer's file."""
    return _MAGIC + orjson.dumps({"producer": producer, "incarnation": incarnation}) + b"\n"


def producer_in(head: bytes) -> str:
    """Whose file it is, of a head that `parse` gave."""
    return str(orjson.loads(head[len(_MAGIC) :])["producer"])


def parse(path: Path) -> tuple[bytes, list[tuple[int, Record]], bool]:
    """A file's head, its records, and whether all of it could be read. An unreadable file is b"", [], False."""
    try:
        content = path.read_bytes()
        end = content.index(b"\n", 0, 4096) + 1
        head = content[:end]
        if not isinstance(orjson.loads(head[len(_MAGIC) :])["producer"], str):
            return b"", [], False
    except (OSError, ValueError, KeyError, TypeError):
        return b"", [], False
    if not head.startswith(_MAGIC):
        return b"", [], False
    items: list[tuple[int, Record]] = []
    last = 0
    while end + FRAME.size <= len(content):
        sequence, priority, length, checksum = FRAME.unpack_from(content, end)
        body = content[end + FRAME.size : end + FRAME.size + length]
        whole = length <= _MAX_BODY_BYTES and len(body) == length and zlib.crc32(body) == checksum
        if not whole or not last < sequence <= MAX_INTEGER or (priority == _DROPPED and length != _COUNT.size):
            return head, items, False
        if priority == _DROPPED:
            dropped = Record(Priority.LOG, b"")
            items.extend((sequence + n, dropped) for n in range(_COUNT.unpack(body)[0]))
        else:
            items.append((sequence, Record(Priority(min(priority, Priority.METRICS)), body)))
        last = items[-1][0] if items else sequence
        end += FRAME.size + length
    return head, items, end == len(content)


def frames(numbered: Sequence[tuple[int, Record]]) -> Iterator[bytes]:
    """Each record as a frame; dropped ones that follow each other as one."""
    start = count = 0
    for sequence, record in numbered:
        if not record.body:
            start, count = (start if count else sequence), count + 1
            continue
        if count:
            yield _frame(start, _DROPPED, _COUNT.pack(count))
            count = 0
        yield _frame(sequence, record.priority, record.body)
    if count:
        yield _frame(start, _DROPPED, _COUNT.pack(count))


def _frame(sequence: int, priority: int, body: bytes) -> bytes:
    return FRAME.pack(sequence, priority, len(body), zlib.crc32(body)) + body
