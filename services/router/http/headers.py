"""Which headers travel on, and the bytes of a request's head. Pure.

Hop-by-hop headers are for one connection and end here, both ways; all others pass in their order, repeated ones too.
"""

from collections.abc import Iterable, Sequence

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
_NOT_UPSTREAM = HOP_BY_HOP | {b"host", b"expect", b"content-length"}


def request_head(
    method: str, target: bytes, headers: RawHeaders, *, host: bytes, content_length: int | None, close: bool
) -> bytes:
    """Request line and headers as they go to the worker, whose `host` it is. Header names are lower case.

    content_length: None: the body is sent in chunks; -1: there is none and the client declared none.
    close: ask the worker to close the connection after its answer.
    """
    drop = _dropped(headers, _NOT_UPSTREAM)
    lines = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method.encode("ascii"), target, host)]
    lines += [b"%s: %s\r\n" % (name, value) for name, value in headers if name not in drop]
    if content_length is None:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif content_length >= 0:
        lines.append(b"content-length: %d\r\n" % content_length)
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(lines)


def response_headers(status: int, headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers of a worker's answer as they go to the client. Header names are lower case.

    A length beside `transfer-encoding` is void, and 204 and 304 have no body that it could speak of.
    """
    drop = _dropped(headers, HOP_BY_HOP)
    if status in (204, 304) or any(name == b"transfer-encoding" for name, _ in headers):
        drop = drop | {b"content-length"}
    return [(name, value) for name, value in headers if name not in drop]


def first_value(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first header of a (lower case) name."""
    return next((value for key, value in headers if key == name), None)


def _dropped(headers: RawHeaders, always: frozenset[bytes]) -> frozenset[bytes]:
    """`always`, and what a Connection header names."""
    listed: Iterable[bytes] = (value for name, value in headers if name == b"connection")
    named = {token.strip().lower() for value in listed for token in value.split(b",")}
    return always | named if named else always
