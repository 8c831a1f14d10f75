"""The configuration of a run as a sink may show it to others: no secret, and no more of a URL than its host. Pure."""

from services.metrics.sinks.post import shown
from services.metrics.sinks.sink import SinkContext


def shown_config(context: SinkContext) -> dict[str, object]:
    """Empty: it is not known. What follows a URL's host may be secret, as a webhook's path is."""
    found = context.secrets.redact_tree(_without_urls(dict(context.run_config or {})))
    return found if isinstance(found, dict) else {}


def _without_urls(value: object) -> object:
    if isinstance(value, str):
        return shown(value) if "://" in value else value
    if isinstance(value, dict):
        return {key: _without_urls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_urls(item) for item in value]
    return value
