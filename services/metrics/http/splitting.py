"""Cuts a posted body into records: lines, an array, or both at once, whole or broken. Pure; bounded memory.

A body is read by its content, whatever its type says. One that begins with `[` is an array; any other is lines, each of
one object, or of several that are welded together. What is no record is a refusal with its reason, and the next line
begins anew: nothing that stands in a body ends the rest of it.
"""

import json
import re
from dataclasses import dataclass

import orjson

from services.metrics import mildjson

MAX_RECORD_BYTES = 4 * 1024 * 1024 - 1024
"""Of one record; a longer line is refused without being kept."""
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_SPACES = re.compile(r"[ \t\r\n,]*")
_SPREAD = re.compile(rb"\{[ \t\r]*\n")
"""An object that begins like this goes over several lines."""
_MAY_BE_SPREAD = re.compile(rb"\{[ \t\r]*")
_DECODER = mildjson.DECODER


@dataclass(frozen=True)
class Record:
    """One object."""

    body: bytes
    """JSON on one line."""
    fields: dict[str, object]


@dataclass(frozen=True)
class Refusal:
    """Something that is no record."""

    reason: str


Item = Record | Refusal


class Splitter:
    """Fed with a body piece by piece; gives what is whole so far."""

    def __init__(self) -> None:
        self._rest = b""
        self._values: _Values | None = None
        """Reads what does not go by lines: an array, or an object over several lines."""
        self._begun = False
        self._skipping = False
        """The rest of the present line belongs to a record that is too long."""

    @property
    def held_bytes(self) -> int:
        """About how much waits for its rest."""
        return len(self._rest) + (self._values.held_chars if self._values is not None else 0)

    def feed(self, piece: bytes) -> list[Item]:
        """What became whole by this piece."""
        items: list[Item] = []
        while piece:
            if not self._begun:
                piece = self._begin(piece)
            elif self._values is not None:
                items += self._values.feed(piece)
                piece = self._values.left
                if self._values.ended:
                    self._begun, self._values = False, None
            else:
                items += self._lines(piece)
                piece = b""
        return items

    def finish(self) -> list[Item]:
        """The body has ended: what is left."""
        if self._values is not None:
            return self._values.finish()
        rest, self._rest = self._rest, b""
        return [] if self._skipping else _read_line(rest)

    def _begin(self, piece: bytes) -> bytes:
        """Decide by the first characters; what is left of the piece. Nothing: more is needed."""
        piece = self._rest + piece
        self._rest = b""
        start = piece.removeprefix(_BOM).lstrip(_SPACE)
        if _BOM.startswith(piece) or not start or (len(start) < 64 and _MAY_BE_SPREAD.fullmatch(start)):
            self._rest = piece if start or _BOM.startswith(piece) else b""
            return b""
        self._begun = True
        if start.startswith(b"[") or _SPREAD.match(start):
            is_array = start.startswith(b"[")
            self._values = _Values(bracketed=is_array)
            return start[1:] if is_array else start
        return start

    def _lines(self, piece: bytes) -> list[Item]:
        items: list[Item] = []
        *lines, last = piece.split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
            else:
                items += _read_line(self._rest + line if self._rest else line)
            self._rest = b""
        if not self._skipping:
            self._rest += last
            if len(self._rest) > 2 * MAX_RECORD_BYTES:
                items += self._shorten()
        return items

    def _shorten(self) -> list[Item]:
        """A line that goes on and on: objects are taken off its beginning, or else it is skipped."""
        values, size_bytes = _Values(bracketed=False), len(self._rest)
        items = values.feed(self._rest)
        self._rest = values.held()
        if values.ended or len(self._rest) > MAX_RECORD_BYTES:
            items = [*(items[:-1] if values.ended else items), _too_long(size_bytes)]
            self._rest, self._skipping = b"", True
        return items


class _Values:
    """Values one after another, parted by commas or spaces or by nothing; given as they become whole."""

    def __init__(self, *, bracketed: bool) -> None:
        self.ended = False
        self.left = b""
        """What came after the end."""
        self._bracketed = bracketed
        self._text = ""
        self._tail = b""
        """Bytes of a character that is not whole."""
        self._try_at = 0
        """Characters to wait for before the present value is tried again: it is not parsed for each piece."""

    def feed(self, piece: bytes) -> list[Item]:
        piece = self._tail + piece
        whole = len(piece) - _unfinished(piece)
        self._text += piece[:whole].decode("utf-8", "replace")
        self._tail = piece[whole:]
        return self._read() if len(self._text) >= self._try_at else []

    def finish(self) -> list[Item]:
        self._text += self._tail.decode("utf-8", "replace")
        self._tail = b""
        items = self._read(last=True)
        rest = self._text.strip(" \t\r\n,")
        if rest and not self.ended:
            items.append(Refusal(f"the body ends within a value, or it is broken: {rest[:100]!r}"))
        elif self._bracketed and not self.ended:
            items.append(Refusal("the array has no end: ] is missing"))
        return items

    @property
    def held_chars(self) -> int:
        """The length of what waits for its rest."""
        return len(self._text)

    def held(self) -> bytes:
        """What waits for its rest."""
        return self._text.encode() + self._tail

    def _read(self, *, last: bool = False) -> list[Item]:
        items: list[Item] = []
        at = 0
        while True:
            at = _skip(self._text, at)
            if at >= len(self._text):
                break
            if self._text[at] == "]" and self._bracketed:
                self._end(at + 1)
                return items
            try:
                value, end = _DECODER.raw_decode(self._text, at)
            except (ValueError, RecursionError):
                if len(self._text) - at > MAX_RECORD_BYTES:
                    items.append(Refusal("a value is broken or too long; what follows it is not read"))
                    self._text, self.ended = "", True
                    return items
                break
            if end == len(self._text) and not isinstance(value, dict) and not last:
                break  # a number may go on in the next piece
            items.append(_record(value))
            at = end
        self._text = self._text[at:]
        self._try_at = 2 * len(self._text)
        return items

    def _end(self, at: int) -> None:
        self.left = self._text[at:].encode() + self._tail
        self._text, self._tail, self.ended = "", b"", True


def _read_line(line: bytes) -> list[Item]:
    """A line's records. A blank one has none."""
    line = line.strip(_SPACE).removeprefix(_BOM)
    if not line:
        return []
    if len(line) <= MAX_RECORD_BYTES:
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError:
            pass
        else:
            if isinstance(fields, dict):
                return [_record(fields) if b"\\u" in line else Record(line, fields)]
            if isinstance(fields, list):
                return [_record(value) for value in fields]
            return [_record(fields)]
    return _read_welded(line.decode("utf-8", "replace"))


def _read_welded(text: str) -> list[Item]:
    """Several values on a line, or one that only a milder reader takes; the first broken one ends the line."""
    items: list[Item] = []
    at = 0
    while at < len(text):
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            items.append(Refusal(f"not JSON: {reason}: {text[at : at + 60]!r}"))
            following = text.find("{", at + 1)  # a half line that a whole one is welded to
            if following < 0 or len(items) > 1:
                break
            whole = _whole_object_after(text, at + 1)
            if whole is None:
                break
            at = whole
            continue
        items.append(_record(value))
        at = _skip(text, end)
    return items


def _whole_object_after(text: str, at: int) -> int | None:
    """Where an object begins that is whole up to the line's end. Few tries: a broken line is not worth more."""
    for _ in range(16):
        at = text.find('{"', at)
        if at < 0:
            return None
        try:
            _, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        if end == len(text) or text[_skip(text, end) :].startswith("{") or _skip(text, end) == len(text):
            return at
        at += 1
    return None


def _record(value: object) -> Item:
    if not isinstance(value, dict):
        return Refusal(f"a record is a JSON object, got {type(value).__name__}")
    try:
        body = mildjson.line_of(value)
    except ValueError as error:
        return Refusal(str(error))
    if len(body) > MAX_RECORD_BYTES:
        return _too_long(len(body))
    return Record(body, value)


def _too_long(size_bytes: int) -> Refusal:
    return Refusal(f"a record has at most {MAX_RECORD_BYTES} bytes, got {size_bytes} or more")


def _skip(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    return found.end() if found else at


def _unfinished(piece: bytes) -> int:
    """How many bytes at the end belong to a UTF-8 character that is not whole."""
    for back in range(1, min(4, len(piece) + 1)):
        byte = piece[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if length > back else 0
    return 0
