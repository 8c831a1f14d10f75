"""Which headers travel on, and the bytes of heads. Pure.

Hop-by-hop headers are for one connection and end here, both ways; all others pass as they are in their order, repeated
ones too. Lines of headers are bytes `name: value\\r\\n`.
"""

from collections.abc import Iterable, Sequence
from http import HTTPStatus

RawHeaders = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
LABELS = b"x-furlong-labels"
NAMED_WORKER = b"x-furlong-worker"
REQUEST_ID = b"x-request-id"
NOT_TO_WORKER = HOP_BY_HOP | {b"host", b"expect", b"content-length", REQUEST_ID, LABELS, NAMED_WORKER}
"""Written anew, or meant for the router."""
NOT_TO_CLIENT = HOP_BY_HOP | {b"content-length", REQUEST_ID}
"""Written anew."""
PLAIN_CONNECTION = frozenset((b"keep-alive", b"close"))
"""Values of Connection that name no header."""

STATUS_LINES = {int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}


def request_head(
    method: str,
    target: bytes,
    lines: Iterable[bytes],
    *,
    host: bytes,
    content_length: int | None,
    close: bool = False,
) -> bytes:
    """Request line and headers as they go to the worker, whose `host` it is.

    content_length: None: the body is sent in chunks; -1: there is none and the client declared none.
    close: ask the worker to close the connection after its answer.
    """
    if content_length is None:
        framing = b"transfer-encoding: chunked\r\n"
    elif content_length >= 0:
        framing = b"content-length: %d\r\n" % content_length
    else:
        framing = b""
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b%b" % (
        method.encode("ascii"),
        target,
        host,
        b"".join(lines),
        framing,
        b"connection: close\r\n\r\n" if close else b"\r\n",
    )


def without_named(lines: Sequence[bytes], connection_values: Iterable[bytes]) -> list[bytes]:
    """Lines without the headers that Connection headers name."""
    named = {token.strip().lower() for value in connection_values for token in value.split(b",")}
    return [line for line in lines if line.partition(b":")[0].lower() not in named]


def status_line(status: int, reason: bytes) -> bytes:
    """The first line of an answer."""
    if not reason and status in STATUS_LINES:
        return STATUS_LINES[status]
    return b"HTTP/1.1 %d %b\r\n" % (status, reason)


def first_value(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first header of a (lower case) name."""
    return next((value for key, value in headers if key == name), None)
