"""Lets a library be imported as if others were not installed, where it does more with them than is wanted."""

import contextlib
import sys
from collections.abc import Generator


@contextlib.contextmanager
def absent(*names: str) -> Generator[None]:
    """While entered, importing one of the names that is not imported yet raises ImportError."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # the import system's own sign for it
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
