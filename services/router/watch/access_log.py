"""The access log: one line for a request that failed, and for one in so many good ones.

Owns what keeps a flood of failures from becoming a flood of lines: of one worker and kind a few lines come in a window
of time, and then one that says how many more there were. Never logs a query, which may hold secrets.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.router.watch.finished import CLIENT_LEFT, WORKER_STATUS, Finished
from services.router.watch.ids import trace_id_of

log = structlog.get_logger()

BURST = 10
"""Lines of one worker and kind in a window."""
WINDOW_S = 10.0
MAX_WINDOWS = 1024
MAX_PATH_CHARS = 200
MAX_MESSAGE_CHARS = 500

Key = tuple[str, str]
"""A worker's address, or nothing, and a kind of failure."""
_REST: Key = ("", "other")


@dataclass
class _Window:
    """The failures of one worker and kind in a time."""

    began: float
    num_lines: int = 0
    num_more: int = 0
    last_request_id: str = ""


class AccessLog:
    """Writes the lines. `now`: monotonic seconds."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._windows: dict[Key, _Window] = {}

    def passed(self, passage: Finished) -> None:
        """A good request that was picked."""
        log.info("request", **fields_of(passage))

    def failed(self, passage: Finished) -> None:
        """A request that failed, or whose client left: a line, or one more in a sum."""
        worker = passage.worker
        key = ("" if worker is None else str(worker.url), passage.error or WORKER_STATUS)
        if key not in self._windows and len(self._windows) >= MAX_WINDOWS:
            key = _REST
        now = self._now()
        window = self._windows.get(key)
        if window is not None and now >= window.began + WINDOW_S:
            self._tell(key, window, now)
            window = None
        if window is None:
            window = self._windows[key] = _Window(now)
        if window.num_lines >= BURST:
            window.num_more += 1
            window.last_request_id = _text(passage.request_id)
            return
        window.num_lines += 1
        if passage.error == CLIENT_LEFT:
            log.debug("request_client_left", **fields_of(passage))
        else:
            log.info("request_failed", **fields_of(passage))

    def tell_sums(self, *, everything: bool = False) -> None:
        """Write the sums of the windows that are over. To be called now and again, and at the end with `everything`."""
        now = self._now()
        for key, window in list(self._windows.items()):
            if everything or now >= window.began + WINDOW_S:
                self._tell(key, window, now)
                del self._windows[key]

    def _tell(self, key: Key, window: _Window, now: float) -> None:
        if not window.num_more:
            return
        seconds = round(now - window.began, 3)
        say = log.debug if key[1] == CLIENT_LEFT else log.info
        say(
            "requests_failed_alike",
            worker=key[0],
            error=key[1],
            num_more=window.num_more,
            seconds=seconds,
            message=f"{window.num_more} more like this in the last {seconds:.0f} s",
            request_id=window.last_request_id,
        )


def fields_of(passage: Finished) -> dict[str, object]:
    """What a line says of a request."""
    started, first_byte = passage.started, passage.first_byte
    fields: dict[str, object] = {
        "request_id": _text(passage.request_id),
        "method": passage.method,
        "path": clipped(passage.path, MAX_PATH_CHARS),
        "status": passage.status,
        "worker": None if passage.worker is None else str(passage.worker.url),
        "tries": passage.num_tries,
        "queued_s": round(passage.queued_s, 6),
        "first_byte_s": round(first_byte - started, 6) if first_byte else None,
        "seconds": round(passage.ended - started, 6),
        "bytes_in": passage.bytes_in,
        "bytes_out": passage.bytes_out,
        "client": passage.client,
    }
    if trace_id := trace_id_of(passage.headers):
        fields["trace_id"] = trace_id
    if passage.error or passage.status >= 500:
        fields["error"] = passage.error or WORKER_STATUS
    if passage.error_message:
        fields["error_message"] = clipped(passage.error_message, MAX_MESSAGE_CHARS)
    return fields


def clipped(text: str, max_chars: int) -> str:
    """The beginning of a text that a client or a worker made, and how much more there was."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}...[{len(text) - max_chars} more]"


def _text(request_id: bytes) -> str:
    return request_id.decode("ascii", "replace")
