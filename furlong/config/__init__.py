"""The configuration of a whole run: one frozen model, read from TOML, then flags.

`sections.py` holds the fields with their defaults and documentation, `rules.py` what must hold between them, `load.py`
the way from a file and flags to a resolved `RunConfig`, `dump.py` the way back to TOML.
"""

from furlong.config.dump import to_toml
from furlong.config.errors import ConfigError
from furlong.config.load import load_config, load_resolved
from furlong.config.sections import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config", "load_resolved", "to_toml"]
