"""What stands on a line: one JSON object, several welded together, a torn one, or text. Pure.

Two programs that write to one file without a lock, or one that was killed while it wrote, leave such lines.
"""

from dataclasses import dataclass

import orjson

from services.metrics import mildjson

_MAX_PIECES = 256
_MAX_TRIES = 32
_DECODER = mildjson.DECODER


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object."""

    fields: dict[str, object]
    body: bytes
    """The same as one line of JSON."""


Piece = JsonObject | str


def pieces(content: bytes, text: str) -> list[Piece]:
    """The objects and the text of a line that begins with a brace, in order.

    content: as it was read. text: the same, decoded, with what is no UTF-8 replaced.
    """
    whole = _parse(content, text)
    if whole is not None:
        return [whole]
    found: list[Piece] = []
    start, tries = 0, 0
    while start < len(text) and len(found) < _MAX_PIECES:
        rest = text[start:].lstrip()
        if not rest:
            return found
        start = len(text) - len(rest)
        end = _object_end(rest) if rest[0] == "{" else None
        if end is not None and (parsed := _parse_text(rest[:end])) is not None:
            found.append(parsed)
            start += end
            continue
        torn_at = _next_object(rest, _MAX_TRIES - tries)
        tries = _MAX_TRIES if torn_at is None else tries + 1
        found.append(rest if torn_at is None else rest[:torn_at])
        start += len(rest) if torn_at is None else torn_at
    return found if start >= len(text) else [*found, text[start:]]


def _parse(content: bytes, text: str) -> JsonObject | None:
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError:
        return _parse_text(text)
    return JsonObject(parsed, content) if isinstance(parsed, dict) else None


def _parse_text(text: str) -> JsonObject | None:
    """What orjson refuses and other writers do: NaN, Infinity, lone surrogates, bytes that are no UTF-8."""
    try:
        return JsonObject(*mildjson.read_object(text.encode("utf-8", "replace")))
    except ValueError:
        return None


def _object_end(text: str) -> int | None:
    try:
        return _DECODER.raw_decode(text)[1]
    except (ValueError, RecursionError):
        return None


def _next_object(text: str, max_tries: int) -> int | None:
    """Where, after the first character, an object begins that can be read."""
    at = 0
    for _ in range(max_tries):
        at = text.find('{"', at + 1)
        if at < 0:
            return None
        if _object_end(text[at:]) is not None:
            return at
    return None
