"""Sinks of the user's own, each in a process of its own (user_process.py). Imports none of the user's code."""

from collections.abc import Mapping

from services.metrics.sinks.process import ProcessSink
from services.metrics.sinks.shown_config import shown_config
from services.metrics.sinks.sink import SinkContext, option_of

START_TIMEOUT_S = 60.0


def make(options: Mapping[str, object], context: SinkContext) -> ProcessSink:
    """Options: `class`, the dotted path."""
    path = option_of(options, context, "class", str)
    settings = {
        "class": path,
        "run": str(_name(context.run_config)),
        "config": shown_config(context),
    }
    return ProcessSink(
        "services.metrics.sinks.user_process.UserSinkHost",
        settings,
        context,
        start_timeout_s=START_TIMEOUT_S,
        finish_timeout_s=max(2.0, context.drain_budget_s / 2),
    )


def _name(config: Mapping[str, object] | None) -> object:
    section = (config or {}).get("run")
    return section.get("name", "") if isinstance(section, Mapping) else ""
