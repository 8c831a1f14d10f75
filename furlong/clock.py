"""Time as it stands in every record: UTC, ISO 8601, microseconds."""

import time

_second = (-1, "")


def now_iso() -> str:
    """Now: `2026-11-29T17:03:41.123456Z`."""
    return iso(time.time_ns() // 1000)


def iso(microseconds: int) -> str:
    """Microseconds since the epoch as ISO 8601."""
    global _second  # the text of the current second, which most calls share
    seconds, rest = divmod(microseconds, 1_000_000)
    cached = _second
    if cached[0] != seconds:
        cached = _second = (seconds, time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(seconds)))
    return f"{cached[1]}{rest:06d}Z"
