"""The kinds of sinks: which module makes one. A module is imported when the first of its kind is wanted.

Each module has `make(options: Mapping[str, object], context: SinkContext) -> Sink`, which raises ConfigError for
options that cannot be, and does nothing yet that may fail or wait.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any  # Any: a sink of rows or of batches

from furlong.config import ConfigError
from furlong.config.errors import Problem
from services.metrics.sinks.sink import Sink, SinkContext


@dataclass(frozen=True)
class Kind:
    """What is known of a kind before its module is imported."""

    module: str
    follows: str = "rows"
    """`rows`, or `batches` of records."""
    per_run: bool = False
    """One sink a run, made when the run is first seen. False: one for all runs."""
    refused_live: str = ""
    """Why it cannot be added over HTTP. Empty: it can."""
    needs: tuple[str, ...] = ()
    """Modules that must be installed."""
    extra: str = "metrics"
    """The extra of the distribution that installs them."""


_HERE = "services.metrics.sinks"
KINDS: Mapping[str, Kind] = {
    "jsonl": Kind(f"{_HERE}.jsonl"),
    "wandb": Kind(f"{_HERE}.wandb_sink", per_run=True, needs=("wandb",), extra="wandb"),
    "tensorboard": Kind(f"{_HERE}.tensorboard", needs=("tensorboardX",), extra="tensorboard"),
    "mlflow": Kind(f"{_HERE}.mlflow", needs=("mlflow",), extra="mlflow"),
    "statsd": Kind(f"{_HERE}.statsd"),
    "otlp": Kind(f"{_HERE}.otlp", needs=("opentelemetry.proto",)),
    "otlp_logs": Kind(f"{_HERE}.otlp_logs", follows="batches", needs=("opentelemetry.proto",)),
    "webhook": Kind(f"{_HERE}.webhook", needs=("aiohttp",)),
    "python": Kind(
        f"{_HERE}.user", refused_live="it runs code of your choice: name it with --metrics-sink at the service's start"
    ),
}


def kind_of(name: str, *, key: str = "kind") -> Kind:
    """Raises ConfigError naming those that there are."""
    kind = KINDS.get(name)
    if kind is None:
        live = sorted(known for known, found in KINDS.items() if not found.refused_live)
        raise ConfigError([Problem(key, name, f"must be one of {', '.join(live)}")])
    return kind


def make_sink(kind: str, options: Mapping[str, object], context: SinkContext) -> Sink[Any]:
    """Make one. Raises ConfigError. May take long, for imports."""
    found = kind_of(kind, key=f"sinks.{context.name}.kind")
    missing = [name for name in found.needs if importlib.util.find_spec(name) is None]
    if missing:
        rule = f"needs what is not installed: {', '.join(missing)}"
        remedy = f"Run: pip install 'furlong-rl[{found.extra}]'."
        raise ConfigError([Problem(f"sinks.{context.name}.kind", kind, rule, remedy)])
    sink: Sink[Any] = importlib.import_module(found.module).make(options, context)
    sink.name = context.name
    return sink
