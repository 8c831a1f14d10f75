"""Answers that the router itself gives, as JSON: errors name what happened, to whom, and what to do."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from services.router.http.asgi import Send
from services.router.http.headers import status_line
from services.router.settings import RouterSettings


def error_answer(
    status: int,
    kind: str,
    message: str,
    *,
    lines: Iterable[bytes] = (),
    close: bool,
    bodiless: bool = False,
    **more: object,
) -> bytes:
    """An error as the bytes of a whole answer. lines: more headers; bodiless: the answer to a HEAD request."""
    body = orjson.dumps(error_content(kind, message, **more))
    return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b%b%b" % (
        status_line(status, b""),
        len(body),
        b"".join(lines),
        b"connection: close\r\n\r\n" if close else b"\r\n",
        b"" if bodiless else body,
    )


def retry_after_s(settings: RouterSettings) -> int:
    """Seconds in which the state of workers may change."""
    return math.ceil(settings.health_interval_s)


async def answer_json(
    send: Send, status: int, content: Mapping[str, Any], *, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:  # Any: JSON's own open tree
    """A whole answer."""
    body = orjson.dumps(content)
    length = (b"content-length", b"%d" % len(body))
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json"), length, *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})


def error_content(kind: str, message: str, **more: object) -> dict[str, object]:
    """The body of an error: {"error": {"type", "message", ...}}."""
    return {"error": {"type": kind, "message": message, **more}}


async def answer_error(
    send: Send, status: int, kind: str, message: str, *, headers: Sequence[tuple[bytes, bytes]] = (), **more: object
) -> None:
    """An error as a whole answer. kind: a word that a program can tell errors apart by."""
    await answer_json(send, status, error_content(kind, message, **more), headers=headers)
