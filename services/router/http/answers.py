"""Answers that the router itself gives, as JSON: errors name what happened, to whom, and what to do."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.router.http.asgi import Send
from services.router.settings import RouterSettings


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


async def answer_unavailable(send: Send, kind: str, message: str, settings: RouterSettings) -> None:
    """503, with a Retry-After of the time in which the state of workers may change."""
    retry_after = b"%d" % math.ceil(settings.health_interval_s)
    await answer_error(send, 503, kind, message, headers=[(b"retry-after", retry_after)])
