"""Any Python object as one line of JSON, without secrets. Used for log lines and for records.

`to_line` never raises, whatever it is given: what JSON cannot hold is replaced by text that says what it was. Numbers
that are not finite become the strings "NaN", "Infinity" and "-Infinity"; huge values are clipped with a mark.
"""

import dataclasses
import datetime
import enum
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import PurePath
from urllib.parse import quote

import orjson

from furlong.secretvalues import MIN_CHARS, secrets_in

MAX_TEXT_CHARS = 16_384
"""A longer string in a log line is clipped."""
MAX_LINE_BYTES = 256 * 1024
"""A longer log line loses its largest values."""
MAX_ITEMS = 1_000
MAX_DEPTH = 8
REDACTED = "[redacted]"


class Secrets:
    """The values that must appear in no line: those of environment variables whose names say so, and of their files."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self.values = tuple(sorted({v for v in values if len(v) >= MIN_CHARS}, key=len, reverse=True))
        spelled = {form for value in self.values for form in (value, quote(value, safe=""))}
        self.needles = tuple(_plain(form) for form in spelled)
        self._spelled = tuple(sorted(spelled, key=len, reverse=True))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Secrets":
        """Those of variables named *_KEY, *_TOKEN, *_SECRET, *PASSWORD, *_AUTHORIZATION, *_HEADERS, *_WEBHOOK_URL,
        *_DSN, *_CREDENTIALS, of the files that *_KEY_FILE and the like name, and passwords within any URL."""
        return cls(secrets_in(os.environ if environment is None else environment))

    def in_line(self, line: bytes) -> bool:
        """Whether an encoded line holds one of them."""
        return any(needle in line for needle in self.needles)

    def redact(self, text: str) -> str:
        """The text without them."""
        for form in self._spelled:
            text = text.replace(form, REDACTED)
        return text

    def redact_tree(self, value: object) -> object:
        """A tree of JSON values without them, in keys, strings and numbers."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, dict):
            return {self.redact(str(key)): self.redact_tree(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.redact_tree(item) for item in value]
        if isinstance(value, bool) or value is None:
            return value
        return REDACTED if self.redact(str(value)) != str(value) else value


NO_SECRETS = Secrets()


def to_line(fields: Mapping[str, object], *, secrets: Secrets = NO_SECRETS, max_bytes: int = MAX_LINE_BYTES) -> bytes:
    """One JSON object, UTF-8, no newline. Never raises."""
    try:
        line = orjson.dumps(_quickly_clean(fields, secrets))
    except Exception:  # whatever a value does when it is looked at
        line = _carefully(fields, secrets)
    if len(line) > max_bytes:
        line = _shrink(line, max_bytes)
    if secrets.needles and secrets.in_line(line):
        line = orjson.dumps(secrets.redact_tree(orjson.loads(line)))
    return line


def clip(text: str, secrets: Secrets = NO_SECRETS) -> str:
    """The text, or its beginning with a mark of how much was cut off."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    whole = secrets.redact(text)  # first: half a secret would no longer be recognised
    if len(whole) <= MAX_TEXT_CHARS:
        return whole
    return f"{whole[:MAX_TEXT_CHARS]}...[{len(whole) - MAX_TEXT_CHARS} more characters]"


def _quickly_clean(fields: Mapping[str, object], secrets: Secrets) -> dict[str, object]:
    """The common types without a call each; everything else through `_clean`."""
    clean: dict[str, object] = {}
    for key, value in fields.items():
        kind = type(value)
        if kind is str:
            clean[key] = value if len(value) <= MAX_TEXT_CHARS else clip(value, secrets)  # type: ignore[arg-type]
        elif kind is int or kind is bool or value is None or (kind is float and math.isfinite(value)):  # type: ignore[arg-type]
            clean[key] = value
        else:
            clean[key] = _clean(value, secrets, MAX_DEPTH, ())
    return clean


def _carefully(fields: Mapping[str, object], secrets: Secrets) -> bytes:
    """Field by field, so that one that cannot be written costs only itself."""
    clean: dict[str, object] = {}
    for key, value in fields.items():
        try:
            safe: object = _clean(value, secrets, MAX_DEPTH, ())
            orjson.dumps(safe)
        except Exception as error:  # a value's own code, or a number beyond 64 bits deep inside
            safe = _unprintable(value, error)
        clean[_well_formed(str(key) if isinstance(key, str) else _text_of(key))] = safe
    return orjson.dumps(clean)


def _clean(value: object, secrets: Secrets, depth: int, parents: tuple[int, ...]) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return _clean(value.value, secrets, depth - 1, parents) if depth else _text_of(value)
    if isinstance(value, str):
        return clip(_well_formed(str(value)), secrets)
    if isinstance(value, int):
        return (
            int(value) if -(2**63) <= value < 2**64 else str(value) if value.bit_length() < 4096 else "[huge integer]"
        )
    if isinstance(value, float):
        return _number(float(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return clip(bytes(value[: MAX_TEXT_CHARS * 4]).decode("utf-8", "replace"), secrets)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, PurePath):
        return _well_formed(str(value))
    if isinstance(value, BaseException):
        return clip(_text_of(value), secrets)
    return _clean_container(value, secrets, depth, parents)


def _clean_container(value: object, secrets: Secrets, depth: int, parents: tuple[int, ...]) -> object:
    if id(value) in parents:
        return "[circular]"
    inside = (*parents, id(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if type(value).__module__.split(".")[0] in ("numpy", "torch", "ml_dtypes"):
        return _clean_array(value, secrets, depth, parents)
    if isinstance(value, Mapping):
        if depth <= 0:
            return "[too deep]"
        first = list(value.items())[:MAX_ITEMS]
        clean = {_key(key, secrets): _clean(item, secrets, depth - 1, inside) for key, item in first}
        if len(value) > MAX_ITEMS:
            clean["..."] = f"[{len(value) - MAX_ITEMS} more]"
        return clean
    if isinstance(value, (Sequence, Set)):
        if depth <= 0:
            return "[too deep]"
        items = [_clean(item, secrets, depth - 1, inside) for item in list(value)[:MAX_ITEMS]]
        return [*items, f"...[{len(value) - MAX_ITEMS} more]"] if len(value) > MAX_ITEMS else items
    return clip(_text_of(value), secrets)


def _clean_array(value: object, secrets: Secrets, depth: int, parents: tuple[int, ...]) -> object:
    """numpy and torch values, by their own methods: neither is imported here."""
    size = getattr(value, "numel", None) or getattr(value, "size", 1)
    count = size() if callable(size) else size
    if count == 1 and hasattr(value, "item"):
        return _clean(value.item(), secrets, depth - 1, parents) if depth else _text_of(value)
    if isinstance(count, int) and count <= MAX_ITEMS and hasattr(value, "tolist"):
        return _clean(value.tolist(), secrets, depth - 1, parents) if depth else "[too deep]"
    shape = getattr(value, "shape", None)
    return f"[{type(value).__name__} {tuple(shape) if shape is not None else ''}]"


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _key(key: object, secrets: Secrets) -> str:
    return clip(_well_formed(key), secrets) if isinstance(key, str) else clip(_text_of(key), secrets)


def _well_formed(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _text_of(value: object) -> str:
    try:
        return _well_formed(repr(value))
    except Exception as error:  # __repr__ is the caller's own code
        return _unprintable(value, error)


def _unprintable(value: object, error: BaseException) -> str:
    return f"[unprintable {type(value).__name__}: {type(error).__name__}]"


def _shrink(line: bytes, max_bytes: int) -> bytes:
    """The line without its largest values, until it fits; each is replaced by its size."""
    fields = orjson.loads(line)
    sizes = sorted(((len(orjson.dumps(value)), key) for key, value in fields.items()), reverse=True)
    excess = len(line) - max_bytes
    for size, key in sizes:
        if excess <= 0:
            break
        fields[key] = f"[{size} bytes left out]"
        excess -= size - len(fields[key])
    line = orjson.dumps(fields)
    if len(line) <= max_bytes:
        return line
    kept = {key: fields[key] for key in list(fields)[:32] if len(key) < 256}  # it was the number of keys
    return orjson.dumps({**kept, "...": f"[{len(fields) - len(kept)} fields left out]"})


def _plain(text: str) -> bytes:
    """The text as it stands inside a JSON string."""
    return orjson.dumps(_well_formed(text))[1:-1]
