"""What a request wants of its worker, by the policy and the request. Pure.

Reads a body only if the policy asks for it and all of it is at hand; what is not JSON wants nothing.
"""

import orjson

from services.router.http.headers import first_value
from services.router.http.request import Request
from services.router.settings import RouterSettings
from services.router.workers.want import Want

MAX_KEY_BYTES = 1024
_PROMPTS = ("text", "prompt", "messages", "input_ids", "input")


def want_of(request: Request, settings: RouterSettings) -> Want:
    """What this request wants."""
    labels = labels_in(request.labels) if request.labels is not None else frozenset()
    if settings.policy == "session":
        return Want(session=_session(request, settings.session_key), labels=labels)
    if settings.policy == "prefix":
        return Want(prefix=_prefix(request, settings.prefix_chars), labels=labels)
    return Want(labels=labels)


def labels_in(value: bytes) -> frozenset[tuple[str, str]]:
    """The labels of a header `pool=eval,zone=a`."""
    pairs = (part.partition("=") for part in value.decode("latin-1").split(","))
    return frozenset((key.strip(), text.strip()) for key, _, text in pairs if key.strip())


def _session(request: Request, key: str) -> bytes:
    where, _, name = key.partition(":")
    if where == "header":
        return (first_value(request.headers, name.lower().encode("latin-1")) or b"")[:MAX_KEY_BYTES]
    value = _json(request).get(name)
    return str(value).encode("utf-8", "replace")[:MAX_KEY_BYTES] if isinstance(value, str | int) else b""


def _prefix(request: Request, size: int) -> bytes:
    body = _json(request)
    for name in _PROMPTS:
        value = body.get(name)
        if isinstance(value, str) and value:
            return value[:size].encode("utf-8", "replace")
        if isinstance(value, list) and value:
            try:
                return _start(value, size)
            except orjson.JSONEncodeError:  # nested deeper than it writes, though not than it reads
                return b""
    return b""


def _start(value: list[object], size: int) -> bytes:
    """How a list of token ids, prompts or messages begins."""
    if isinstance(value[0], int):
        return orjson.dumps(value[:size])
    if isinstance(value[0], str | list):
        first = value[0]
        return first[:size].encode("utf-8", "replace") if isinstance(first, str) else orjson.dumps(first[:size])
    return orjson.dumps(value[:size]).decode("utf-8", "replace")[:size].encode()


def _json(request: Request) -> dict[str, object]:
    if not request.whole or not request.size_bytes:
        return {}
    try:
        tree = orjson.loads(request.body)
    except orjson.JSONDecodeError:
        return {}
    return tree if isinstance(tree, dict) else {}
