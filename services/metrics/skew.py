"""Notices records whose time cannot be right, or missing: they are taken, found by their receive time, and counted."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import structlog

from furlong.clock import iso
from services.metrics.counts import Counts

log = structlog.get_logger()

AHEAD_US = 5 * 60 * 1_000_000
BEHIND_US = 24 * 3600 * 1_000_000
MAX_WARNED_PRODUCERS = 100
_REFRESH_US = 1_000_000


class Skew:
    """The window in which a record's own time is believed."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._low, self._high, self._at_us = "", "", 0
        self._warned: set[str] = set()

    def look(self, records: Sequence[Mapping[str, Any]], now_us: int, producer: str) -> None:
        """Count those outside. Times are compared as text, which is right for the form that records have."""
        if not 0 <= now_us - self._at_us < _REFRESH_US:
            self._low, self._high, self._at_us = iso(now_us - BEHIND_US), iso(now_us + AHEAD_US), now_us
        low, high = self._low, self._high
        try:
            odd = [record for record in records if not low <= record["ts"] <= high]
        except (KeyError, TypeError):  # missing, or a number
            odd = list(records)
        if odd:
            said = [ts for record in odd if (ts := record.get("ts")) is not None]
            self._counts.num_without_ts += len(odd) - len(said)
            wrong = [ts for ts in said if not _is_near(ts, now_us)]
            if wrong:
                self._found(len(wrong), wrong[0], producer)

    def _found(self, number: int, example: object, producer: str) -> None:
        self._counts.num_skewed += number
        if producer not in self._warned and len(self._warned) < MAX_WARNED_PRODUCERS:
            self._warned.add(producer)
            log.warning("records_skewed", producer=producer, given=repr(example)[:60])


def _is_near(ts: object, now_us: int) -> bool:
    """A text with another offset from UTC, or a number of seconds, as other programs write them."""
    try:
        if isinstance(ts, str):
            moment = datetime.fromisoformat(ts)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        elif isinstance(ts, (int, float)) and not isinstance(ts, bool):
            seconds = float(ts)
        else:
            return False
        return now_us - BEHIND_US <= seconds * 1e6 <= now_us + AHEAD_US
    except (ValueError, OverflowError):
        return False
