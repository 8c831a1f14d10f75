"""What users' functions give and raise, as text and JSON that can be passed on.

Never raises, whatever a value's methods do.
"""

import numbers
import os
from collections.abc import Mapping
from typing import Any

MAX_CHARS = 1_000
"""More of an error's own text is cut off: every sample may carry it."""
MAX_DEPTH = 20
MAX_INT_BITS = 1024
"""A longer one is text: nothing can read it back as a float."""


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, and the file and line that raised it."""
    try:
        text = str(error)
    except Exception as second:  # __str__ is the user's own
        text = f"[its message raised {type(second).__name__}]"
    return _passable(f"{type(error).__name__}: {text}", MAX_CHARS) + _place(error)


def _place(error: BaseException) -> str:
    """` (FILE:LINE)` of the innermost frame; empty when it was never raised."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return ""
    path = frame.tb_frame.f_code.co_filename.removeprefix(f"{os.getcwd()}/")
    return _passable(f" ({path}:{frame.tb_lineno})", MAX_CHARS)


def describe_value(value: object) -> str:
    """Type and beginning of a value."""
    try:
        text = repr(value)
    except Exception as error:  # __repr__ is the user's own
        text = f"[unprintable: {type(error).__name__}]"
    return _passable(f"{type(value).__name__} {text[:100]}", MAX_CHARS)


def as_text(value: object, *, max_chars: int) -> str:
    """What str() makes of a value, or its beginning."""
    try:
        text = str(value)
    except Exception as error:  # __str__ is the user's own
        text = f"[unprintable {type(value).__name__}: {type(error).__name__}]"
    return text[:max_chars].encode("utf-8", "replace").decode()


def as_json(value: object, *, depth: int = MAX_DEPTH) -> Any:  # Any: JSON is
    """A copy that JSON can hold: text, numbers, lists and dicts of them, also numpy's and torch's; the rest as text."""
    try:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, numbers.Integral) and (whole := int(value)).bit_length() <= MAX_INT_BITS:
            return whole
        if isinstance(value, numbers.Real):
            return float(value)
        if depth and isinstance(value, Mapping):
            items = dict(value).items()
            return {as_text(key, max_chars=MAX_CHARS): as_json(item, depth=depth - 1) for key, item in items}
        if depth and isinstance(value, (list, tuple)):
            return [as_json(item, depth=depth - 1) for item in value]
        if depth and callable(tolist := getattr(value, "tolist", None)):
            return as_json(tolist(), depth=depth - 1)
        return as_text(value, max_chars=MAX_CHARS)
    except Exception:  # its methods are the user's own
        return as_text(value, max_chars=MAX_CHARS)


def _passable(text: str, max_chars: int) -> str:
    """Bounded, and without lone surrogates, which no message can hold."""
    cut = text if len(text) <= max_chars else f"{text[:max_chars]}...[{len(text) - max_chars} more characters]"
    return cut.encode("utf-8", "replace").decode()
