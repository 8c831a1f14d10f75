"""Reads the file that wandb keeps of a run, whole or torn: a header, then LevelDB's log format. Imports no wandb.

Used to learn up to which row an offline run has everything, when its process was killed.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 32 * 1024
_HEADER = struct.Struct("<4sHB")
_FRAME = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4
_MAGIC = (b":W&B", 0xBEE1)


def contents(path: Path) -> Iterator[bytes]:
    """The records as they stand there, up to the first that is torn. Raises OSError; a foreign file has none."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or _HEADER.unpack(header)[:2] != _MAGIC:
            return
        parts = b""
        block = file.read(BLOCK_BYTES - _HEADER.size)
        while block:
            for kind, body in _frames(block):
                parts = body if kind in (_WHOLE, _FIRST) else parts + body
                if kind in (_WHOLE, _LAST):
                    yield parts
            block = file.read(BLOCK_BYTES)


def _frames(block: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _FRAME.size <= len(block):
        _, length, kind = _FRAME.unpack_from(block, at)
        body = block[at + _FRAME.size : at + _FRAME.size + length]
        if kind == 0 or len(body) < length:  # padding, or torn
            return
        yield kind, body
        at += _FRAME.size + length
