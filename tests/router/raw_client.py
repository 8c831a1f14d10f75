"""A client that sends bytes as they are and shows the answer as it came."""

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class RawAnswer:
    """An answer, parsed no further than a test needs."""

    status: int
    head: bytes
    body: bytes
    """As on the wire, chunk sizes and all."""

    def header(self, name: bytes) -> list[bytes]:
        lines = self.head.split(b"\r\n")[1:]
        pairs = (line.partition(b":") for line in lines)
        return [value.strip() for key, _, value in pairs if key.lower() == name]


async def exchange(port: int, request: bytes, *, host: str = "127.0.0.1", timeout_s: float = 10.0) -> RawAnswer:
    """Send bytes and read until the router closes; the request should say `connection: close`."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(request)
            data = await reader.read(-1)
        finally:
            writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return RawAnswer(int(head.split(b" ")[1]) if head else 0, head, body)


def post(path: bytes, body: bytes = b"{}", *, extra: bytes = b"") -> bytes:
    """A POST as bytes, of a client that wants the connection closed."""
    length = b"content-length: %d\r\n" % len(body)
    return b"POST " + path + b" HTTP/1.1\r\nhost: router\r\nconnection: close\r\n" + length + extra + b"\r\n" + body


def get(path: bytes, *, method: bytes = b"GET", extra: bytes = b"") -> bytes:
    """A request without body, of a client that wants the connection closed."""
    return method + b" " + path + b" HTTP/1.1\r\nhost: router\r\nconnection: close\r\n" + extra + b"\r\n"
