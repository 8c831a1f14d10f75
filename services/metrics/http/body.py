"""Reads a request's body piece by piece, unpacked, within limits: size, unpacked size, and time without a byte.

A packed body is checked to its end before any of it is given on: one that was damaged on its way unpacks, for a while,
into numbers that nobody sent.
"""

import asyncio
import contextlib
import tempfile
import zlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import IO

from fastapi import Request

from services.metrics.http.errors import Problem

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_UNPACKED_BYTES = 256 * 1024 * 1024
PIECE_BYTES = 256 * 1024
IDLE_S = 30.0
_IN_MEMORY_BYTES = 1024 * 1024
"""Of a packed body; more of it waits in a temporary file."""
_LESS = "Send the records in several requests."
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


@dataclass
class Packed:
    """What is held of a packed body until it has ended."""

    memory_bytes: int = 0
    disk_bytes: int = 0


async def pieces(request: Request, held: Packed) -> AsyncGenerator[bytes]:
    """The body, unpacked. Raises Problem, and ClientDisconnect.

    held: kept up to date. While a packed body comes each piece is empty, and a moment to end what holds too much.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    length = request.headers.get("content-length", "")
    if encoding not in ("", "identity", *_WBITS):
        error = f"Content-Encoding must be gzip, deflate or identity, got {encoding[:100]!r}"
        raise Problem(415, error, "Set gzip, or no compression.")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise Problem(413, f"a body has at most {MAX_BODY_BYTES} bytes, got {length}", _LESS)
    source = _unpacked(request, _WBITS[encoding], held) if encoding in _WBITS else _limited(request)
    async with contextlib.aclosing(source):
        async for piece in source:
            yield piece


async def _unpacked(request: Request, wbits: int, held: Packed) -> AsyncGenerator[bytes]:
    with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as packed:
        async for piece in _limited(request):
            size_bytes = held.memory_bytes + held.disk_bytes + len(piece)
            if size_bytes <= _IN_MEMORY_BYTES:
                packed.write(piece)
                held.memory_bytes = size_bytes
            else:
                await asyncio.to_thread(_write, packed, piece)
                held.memory_bytes, held.disk_bytes = 0, size_bytes
            yield b""
        await asyncio.to_thread(_check, packed, wbits)
        unpacking = _unpack(packed, wbits)
        while piece := await asyncio.to_thread(next, unpacking, b""):
            yield piece


async def _limited(request: Request) -> AsyncGenerator[bytes]:
    stream = request.stream()
    size_bytes = 0
    while True:
        try:
            piece = await asyncio.wait_for(anext(stream), IDLE_S)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Problem(408, f"no byte of the body came for {IDLE_S:g} s", "Send it again.") from None
        size_bytes += len(piece)
        if size_bytes > MAX_BODY_BYTES:
            raise Problem(413, f"a body has at most {MAX_BODY_BYTES} bytes", _LESS)
        if piece:
            yield piece


def _write(packed: IO[bytes], piece: bytes) -> None:
    """Raises Problem."""
    try:
        packed.write(piece)
    except OSError as error:
        why = f"{tempfile.gettempdir()} has no room for a packed body: {error}"
        raise Problem(
            429, why, f"Make room there, or send less than {_IN_MEMORY_BYTES} bytes.", retry_after_s=5
        ) from None


def _check(packed: IO[bytes], wbits: int) -> None:
    """To its end, with its checksum. Raises Problem."""
    size_bytes = 0
    for piece in _unpack(packed, wbits):
        size_bytes += len(piece)
        if size_bytes > MAX_UNPACKED_BYTES:
            raise Problem(413, f"a body has at most {MAX_UNPACKED_BYTES} bytes once unpacked", _LESS)


def _unpack(packed: IO[bytes], wbits: int) -> Iterator[bytes]:
    """From the beginning, never more than a piece at a time; gzip of several members too. Raises Problem."""
    packed.seek(0)
    inner = zlib.decompressobj(wbits)
    begun = False
    while waiting := packed.read(PIECE_BYTES):
        while waiting:
            if inner.eof:
                waiting = waiting.lstrip(b"\0")  # padding
                if not waiting:
                    break
                inner = zlib.decompressobj(wbits)
            begun = True
            try:
                piece = inner.decompress(waiting, PIECE_BYTES)
            except zlib.error as error:
                raise Problem(
                    400, f"the body cannot be unpacked: {error}", "Mend what packs it, or send it unpacked."
                ) from None
            waiting = inner.unused_data if inner.eof else inner.unconsumed_tail
            if piece:
                yield piece
    while begun and not inner.eof:
        piece = inner.decompress(b"", PIECE_BYTES)
        if not piece:
            raise Problem(400, "the body ends within its packed stream", "Send it again.")
        yield piece
