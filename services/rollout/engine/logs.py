"""The engine's log lines: one JSON object a line on stdout.

It owns their keys (ts, level, event, service, instance). It must never block: a line is one write.
"""

from __future__ import annotations

import logging
import sys

import orjson
import structlog


def configure(*, instance: str, level: str) -> None:
    """Set structlog up for this process."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dump),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.BytesLoggerFactory(file=sys.stdout.buffer),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service="engine", instance=instance)


def _dump(value: object, **_options: object) -> bytes:
    return orjson.dumps(value, default=repr)
