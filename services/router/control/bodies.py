"""Reading the JSON body of a control request: bounded, checked against its model, told what is wrong.

The content type is not asked for: `curl -d` sends a form's.
"""

import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from services.router.control.refusals import Refusal

Model = TypeVar("Model", bound=BaseModel)

MAX_DISCARDED_BYTES = 4 * 1024 * 1024
"""How much of too large a body is read to its end: a client that is cut off while it sends may never see the answer."""


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """All of a body. Raises Refusal 413."""
    body, size_bytes = bytearray(), 0
    async for piece in request.stream():
        size_bytes += len(piece)
        if size_bytes <= limit_bytes:
            body += piece
        else:
            body.clear()
        if size_bytes > MAX_DISCARDED_BYTES:
            break
    if size_bytes > limit_bytes:
        raise Refusal(413, "body_too_large", f"the body must have at most {limit_bytes} bytes")
    return bytes(body)


def parse(model: type[Model], body: bytes, *, example: str) -> Model:
    """A body as its model. Raises Refusal 400, which never repeats what was sent."""
    return validated(model, read_object(body, example=example))


def read_object(body: bytes, *, example: str) -> dict[str, Any]:
    """A body that must be a JSON object. Raises Refusal 400."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "bad_request", f"the body must be JSON such as {example}: {_brief(error)}") from error
    if not isinstance(tree, dict):
        raise Refusal(400, "bad_request", f"the body must be a JSON object such as {example}")
    return tree


def validated(model: type[Model], tree: dict[str, Any]) -> Model:
    """A JSON object as its model. Raises Refusal 400."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, found['loc']))[:100]}: {found['msg']}" for found in error.errors(include_input=False)
        ]
        raise Refusal(400, "bad_request", "; ".join(problems[:8])) from error


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """How a body stands in OpenAPI."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _brief(error: Exception) -> str:
    return str(error)[:200] or "it is nested too deep"
