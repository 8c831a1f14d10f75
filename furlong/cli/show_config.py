"""`furlong config`: the resolved run as TOML, with every value that follows from others."""

from collections.abc import Sequence

from furlong.cli.arguments import read_run, take_options
from furlong.config import to_toml

DESCRIPTION = "Print the resolved run as TOML: the file, with the flags over it and everything that follows filled in."


def show_config(arguments: Sequence[str]) -> int:
    """Print it. Nothing is started or written; files and folders are not looked at."""
    config = read_run(take_options(arguments, ("config",)), prog="furlong config", description=DESCRIPTION)
    print(to_toml(config), end="", flush=True)
    return 0
