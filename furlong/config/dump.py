"""A resolved run as TOML. It holds no secret, since no field of a run may hold one."""

from typing import Any

import tomli_w

from furlong.config.sections import RunConfig


def to_toml(config: RunConfig) -> str:
    """The run as TOML that `load_resolved` reads back to an equal run. A field without a value is left out."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:  # Any: TOML's own open tree of values
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }
