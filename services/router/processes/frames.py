"""What the primary and a secondary say to each other: frames of JSON with bytes behind, over a pair of Unix sockets.

    4 bytes: length of the JSON. 4 bytes: length of the bytes. Both big-endian. Then the two.

Knows no meaning. The other end is our own program of the same version: what is not a frame ends the link.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import orjson

Frame = dict[str, Any]  # Any: JSON's own open tree
HEAD = struct.Struct(">II")
MAX_FRAME_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 256 * 1024
"""Longer bytes are sent in pieces, so that other frames find their way between."""


class BadFrame(Exception):
    """What came is no frame."""


def encode(frame: Frame, blob: bytes = b"") -> bytes:
    """As it is sent."""
    told = orjson.dumps(frame)
    return b"%b%b%b" % (HEAD.pack(len(told), len(blob)), told, blob)


class Link(asyncio.Protocol):
    """One end of the pair."""

    def __init__(self) -> None:
        self._on_frame: Callable[[Frame, bytes], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._buffer = bytearray()
        self._transport: asyncio.Transport
        self._ended = asyncio.Event()
        self.full = False
        """Much waits to be sent: what can wait should."""
        self.on_room: Callable[[], None] | None = None
        """Called when it is no longer full."""

    @classmethod
    async def over(cls, sock: socket.socket) -> "Link":
        """On a connected socket, which it closes at its end."""
        sock.setblocking(False)
        _, link = await asyncio.get_running_loop().create_unix_connection(cls, sock=sock)
        return link

    def begin(self, on_frame: Callable[[Frame, bytes], None], on_end: Callable[[], None]) -> None:
        """Call on_frame for each frame, on_end once when the other end is gone."""
        self._on_frame, self._on_end = on_frame, on_end
        self.data_received(b"")
        if self._ended.is_set():
            on_end()

    def send(self, frame: Frame, blob: bytes = b"") -> None:
        """Send a frame; never waits. Does nothing once the other end is gone."""
        self.send_encoded(encode(frame, blob))

    def send_encoded(self, data: bytes) -> None:
        """Send what `encode` made."""
        if not self._transport.is_closing():
            self._transport.write(data)

    async def finish(self, timeout_s: float) -> None:
        """End the link, after what was sent went out; on_end is not called."""
        self._on_end = None
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=4 * 1024 * 1024)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._on_frame is not None and len(self._buffer) >= HEAD.size:
            told, size = HEAD.unpack_from(self._buffer)
            end = HEAD.size + told + size
            if end > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame must have at most {MAX_FRAME_BYTES} bytes, got {end}")
            if len(self._buffer) < end:
                return
            frame = orjson.loads(bytes(self._buffer[HEAD.size : HEAD.size + told]))
            blob = bytes(self._buffer[HEAD.size + told : end])
            del self._buffer[:end]
            self._on_frame(frame, blob)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self.on_room is not None:
            self.on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()
        if self._on_end is not None:
            self._on_end()


def read_frame(sock: socket.socket, *, timeout_s: float) -> Frame:
    """The first frame, before there is an event loop. Raises OSError, BadFrame."""
    sock.settimeout(timeout_s)
    told, size = HEAD.unpack(_read(sock, HEAD.size))
    return cast(Frame, orjson.loads(_read(sock, told + size)[:told]))


def _read(sock: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        piece = sock.recv(size_bytes - len(data))
        if not piece:
            raise BadFrame("the other end is gone")
        data += piece
    return bytes(data)
