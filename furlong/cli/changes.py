"""What differs between the run as it was last started and as it is now."""

import tomllib
from pathlib import Path

from furlong.config import RunConfig, to_toml

_URLS = {("metrics", name) for name in ("metrics_webhook", "otlp_endpoint", "alert_webhook", "mlflow_tracking_uri")}


def changed_values(earlier_path: Path, config: RunConfig) -> list[str]:
    """`section.key: OLD -> NEW` for each value that differs. An unreadable earlier file is one such line."""
    try:
        earlier = tomllib.loads(earlier_path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return [f"{earlier_path} could not be compared ({error}); it is written anew"]
    now = tomllib.loads(to_toml(config))
    changes = []
    for section in sorted(earlier.keys() | now.keys()):
        before, after = earlier.get(section, {}), now.get(section, {})
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                hidden = (section, key) in _URLS  # a path or a query may be a secret
                values = "" if hidden else f": {_shown(before.get(key))} -> {_shown(after.get(key))}"
                changes.append(f"{section}.{key}{values}")
    return changes


def _shown(value: object) -> str:
    return "not set" if value is None else repr(value)
