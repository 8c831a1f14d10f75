"""Errors that a client sees, in the shapes that SGLang gives them.

It owns the bodies and status codes. It must never carry a stack trace or a path of ours to a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RequestError(Exception):
    """A request that is answered with an error body."""

    def __init__(self, status: int, body: Mapping[str, Any], message: str, *, in_stream: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.message = message
        self.in_stream = in_stream
        """Whether SGLang tells a streaming client inside a 200 stream."""


def contract_error(message: str) -> RequestError:
    """A sampling parameter of an unknown name or the wrong type: 400 with a bare string."""
    return RequestError(400, {"error": message}, message)


def semantic_error(message: str) -> RequestError:
    """A request that is well formed but cannot be served: 400."""
    return RequestError(400, {"error": {"message": message}}, message, in_stream=True)


def validation_error(message: str, *, kind: str = "Bad Request", status: int = 400) -> RequestError:
    """A body of the wrong shape (FastAPI's 422, which SGLang answers as 400)."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return RequestError(status, body, message)


def field_error(loc: tuple[str | int, ...], kind: str, message: str, value: object) -> RequestError:
    """One field that does not validate."""
    shown = repr(value)
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    detail = f"{{'type': {kind!r}, 'loc': {loc!r}, 'msg': {message!r}, 'input': {shown}}}"
    return validation_error(f"1 validation error:\n  {detail}")


def openai_error(error: RequestError) -> RequestError:
    """The same error in the body that /v1 endpoints use."""
    if "object" in error.body:
        return error
    kind = "BadRequestError" if error.status == 400 else "ServiceUnavailableError"
    return validation_error(error.message, kind=kind, status=error.status)


def unavailable(message: str) -> RequestError:
    """The engine cannot serve now: 503."""
    body = {"object": "error", "message": message, "type": "503", "param": None, "code": 503}
    return RequestError(503, body, message)
