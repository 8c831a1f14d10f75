"""Reads JSON as other programs write it, and writes it again without losing any of it. Pure.

What orjson refuses and others write: NaN and Infinity, numbers beyond a float, halves of surrogate pairs, bytes that
are no UTF-8. Never cuts anything off: a number that is left out is one that is wrong.
"""

import json
import math
from collections.abc import Mapping

import orjson

_MAX_DIGITS = 20


def _float(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else "Infinity" if number > 0 else "-Infinity"


def _integer(text: str) -> int | float | str:
    """Beyond 64 bits it is a float, as for orjson."""
    exact = int(text) if len(text) <= _MAX_DIGITS else 2**64
    return exact if -(2**63) <= exact < 2**64 else _float(text)


DECODER = json.JSONDecoder(parse_constant=lambda name: name, parse_float=_float, parse_int=_integer)
"""Its methods raise ValueError, and RecursionError for what is nested too deeply."""


def read_object(content: bytes) -> tuple[dict[str, object], bytes]:
    """The object that content is, and the same as one line. Raises ValueError saying why it is none."""
    text = content.decode("utf-8", "replace")
    try:
        fields = DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a record is a JSON object, got {type(fields).__name__}")
    line = line_of(fields)
    return orjson.loads(line), line  # as they stand in the line: half a surrogate pair fits no text of ours


def line_of(fields: Mapping[str, object]) -> bytes:
    """What DECODER or orjson has read, as one line of JSON. Raises ValueError when it is nested too deeply."""
    try:
        return orjson.dumps(fields)
    except TypeError:  # half a surrogate pair, or deeper than orjson writes
        pass
    try:
        line = json.dumps(_well_formed(fields), ensure_ascii=False, separators=(",", ":")).encode()
        orjson.loads(line)  # who reads it later must be able to
    except (RecursionError, ValueError):
        raise ValueError("nested too deeply") from None
    return line


def _well_formed(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_well_formed(item) for item in value]
    return value
