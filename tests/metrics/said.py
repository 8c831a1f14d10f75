"""What a process says in its log, for tests that look at it."""

from collections.abc import MutableMapping, Sequence
from typing import Any

Said = Sequence[MutableMapping[str, Any]]  # Any: the fields of a log line


def events(said: Said) -> list[str]:
    """The names of the events."""
    return [line["event"] for line in said]
