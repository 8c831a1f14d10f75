"""What is said of a worker when it is registered, beside its address, and what is kept of that over a restart. Checks.

The limits keep what clients send out of places where it could do harm: labels are compared with a header's, the key is
sent as a header, all of it is written to the state file.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.router.workers.urls import BadWorker

DEFAULT_TYPE = "regular"
NO_LABELS: Mapping[str, str] = types.MappingProxyType({})
MAX_LABELS = 64
MAX_CHARS = 256
MAX_KEY_CHARS = 4096
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A worker's description. Raises BadWorker, which never repeats the key."""

    worker_type: str = DEFAULT_TYPE
    labels: Mapping[str, str] = field(default_factory=lambda: NO_LABELS)
    priority: int = 0
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_type(self.worker_type)
        _check_labels(self.labels)
        _check_priority(self.priority)
        _check_key(self.api_key)
        object.__setattr__(self, "labels", types.MappingProxyType(dict(self.labels)))


@dataclass(frozen=True, kw_only=True)
class Record:
    """One registration as it outlives the router's process."""

    worker_id: str
    url: str
    registration: Registration
    self_admitting: bool
    """It needs no confirmation of its weights."""
    paused: bool
    """Such a one was told to take no requests."""
    configured: bool
    """Named by the router's flags."""


def _check_type(value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CHARS or not _is_visible(value):
        raise BadWorker(
            f"worker_type must be 1 to {MAX_CHARS} visible ASCII characters, such as 'regular'; got {value!r:.80}"
        )


def _check_labels(labels: object) -> None:
    if not isinstance(labels, Mapping) or len(labels) > MAX_LABELS:
        raise BadWorker(f"labels must be an object of at most {MAX_LABELS} strings, such as {{'pool': 'eval'}}")
    for key, value in labels.items():
        if not _is_label(key) or not _is_label(value):
            raise BadWorker(
                f"labels: {key!r:.80} = {value!r:.80}: both must be strings of 1 to {MAX_CHARS} visible ASCII "
                "characters without ',' and '='"
            )


def _check_priority(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
        raise BadWorker(
            f"priority must be a whole number up to {MAX_PRIORITY}, higher first, such as 50; got {value!r:.80}"
        )


def _check_key(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not 0 < len(value) <= MAX_KEY_CHARS or not _is_visible(value):
        raise BadWorker(f"api_key must be 1 to {MAX_KEY_CHARS} visible ASCII characters, or left out")


def _is_label(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_CHARS and _is_visible(value) and not set(value) & set(",=")


def _is_visible(text: str) -> bool:
    return all("!" <= char <= "~" for char in text)
