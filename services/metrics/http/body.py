"""Reads a request's body piece by piece, unpacked, within limits: size, unpacked size, and time without a byte."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from services.metrics.http.errors import Problem

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_UNPACKED_BYTES = 256 * 1024 * 1024
PIECE_BYTES = 256 * 1024
IDLE_S = 30.0
_LESS = "Send the records in several requests."


class BrokenBody(Exception):
    """The body ends early or cannot be unpacked from here on."""


async def pieces(request: Request) -> AsyncGenerator[bytes]:
    """The body, unpacked. Raises Problem, BrokenBody, ClientDisconnect."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    unpack = _unpacker(encoding)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise Problem(413, f"a body has at most {MAX_BODY_BYTES} bytes, got {length}", _LESS)
    num_packed = num_unpacked = 0
    async for packed in _limited(request):
        num_packed += len(packed)
        if num_packed > MAX_BODY_BYTES:
            raise Problem(413, f"a body has at most {MAX_BODY_BYTES} bytes", _LESS)
        for piece in unpack.feed(packed):
            num_unpacked += len(piece)
            if num_unpacked > MAX_UNPACKED_BYTES:
                raise Problem(413, f"a body has at most {MAX_UNPACKED_BYTES} bytes once unpacked", _LESS)
            yield piece
    unpack.finish()


async def _limited(request: Request) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            piece = await asyncio.wait_for(anext(stream), IDLE_S)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Problem(408, f"no byte of the body came for {IDLE_S:g} s", "Send it again.") from None
        if piece:
            yield piece


def _unpacker(encoding: str) -> "_Plain | _Zlib":
    if encoding in ("identity", ""):
        return _Plain()
    if encoding in ("gzip", "x-gzip"):
        return _Zlib(wbits=16 + zlib.MAX_WBITS)
    if encoding == "deflate":
        return _Zlib(wbits=zlib.MAX_WBITS)
    raise Problem(
        415,
        f"Content-Encoding must be gzip, deflate or identity, got {encoding[:100]!r}",
        "Set gzip, or no compression.",
    )


class _Plain:
    def feed(self, packed: bytes) -> Iterator[bytes]:
        yield packed

    def finish(self) -> None:
        """Nothing is held back."""


class _Zlib:
    """gzip, of several members too, and deflate; never unpacks more than a piece at a time."""

    def __init__(self, *, wbits: int) -> None:
        self._wbits = wbits
        self._inner = zlib.decompressobj(wbits)
        self._begun = False

    def feed(self, packed: bytes) -> Iterator[bytes]:
        while packed:
            if self._inner.eof:
                packed = packed.lstrip(b"\0")  # padding
                if not packed:
                    return
                self._inner = zlib.decompressobj(self._wbits)
            self._begun = True
            try:
                piece = self._inner.decompress(packed, PIECE_BYTES)
            except zlib.error as error:
                raise BrokenBody(f"the body cannot be unpacked: {error}") from None
            packed = self._inner.unused_data if self._inner.eof else self._inner.unconsumed_tail
            if piece:
                yield piece
            elif not packed:
                return

    def finish(self) -> None:
        """Raises BrokenBody when the packed stream has no end."""
        if self._begun and not self._inner.eof:
            raise BrokenBody("the body ends within its packed stream")


__all__ = ["BrokenBody", "ClientDisconnect", "pieces"]
