"""What MLflow allows: names of metrics, parameters, lengths. Pure."""

import re
from collections.abc import Iterator, Mapping

MAX_NAME_CHARS = 250
MAX_PARAM_CHARS = 500
MAX_BATCH_METRICS = 900
"""Of 1,000 entities that a request may hold, parameters and tags included."""
MAX_BATCH_PARAMS = 100

_FORBIDDEN = re.compile(r"[^A-Za-z0-9_./ -]")


def fold_metric(raw: str) -> str:
    """A legal name: it must also be its own normal form as a path."""
    parts = [part if part.strip(". ") else "_" * max(1, len(part)) for part in _FORBIDDEN.sub("_", raw).split("/")]
    return "/".join(parts)


def params_of(config: Mapping[str, object]) -> dict[str, str]:
    """A run's configuration as parameters: `section.key`."""
    return {_FORBIDDEN.sub("_", name)[:MAX_NAME_CHARS]: _shown(value) for name, value in _leaves(config, "")}


def _leaves(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_PARAM_CHARS else text[: MAX_PARAM_CHARS - 3] + "..."
