"""What stands on the command line besides the run's own flags: `--config FILE`, `--rank N` and the like.

Takes its own options out and leaves the rest, which `furlong.config` reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from furlong.config import ConfigError, RunConfig, load_config, load_resolved
from furlong.config.errors import Problem

CONFIG_HELP = """--config FILE reads a TOML file, with a section for each group of options below. Flags win over it, and
--FLAG None takes a value of the file away. Paths are relative to the current folder."""


@dataclass(frozen=True)
class Taken:
    """A command line, parted."""

    options: dict[str, str]
    """Own options that were given, without their dashes."""
    rest: list[str]
    """Everything else, in order."""


def take_options(arguments: Sequence[str], names: Sequence[str]) -> Taken:
    """Part own options (`--name value` or `--name=value`) from the rest. Raises ConfigError when a value is missing."""
    options: dict[str, str] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in names:
            rest.append(word)
            continue
        if not has_value:
            value = next(words, "")
        if not value or (not has_value and value.startswith("--")):
            raise ConfigError([Problem(f"--{name}", value, "must be given a value")])
        options[name] = value
    return Taken(options, rest)


def whole_number(options: dict[str, str], name: str) -> int | None:
    """An option that must be a number from 0; None when it was not given. Raises ConfigError."""
    text = options.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise ConfigError([Problem(f"--{name}", text, "must be a whole number from 0")])
    return int(text)


def read_run(taken: Taken, *, prog: str, description: str) -> RunConfig:
    """The run that `--config` and the flags describe. Raises ConfigError; `--help` raises SystemExit."""
    config_path = taken.options.get("config")
    if not config_path and not taken.rest:
        remedy = f"For example: {prog} --config examples/arithmetic/config.toml. {prog} --help lists the flags."
        raise ConfigError([Problem("--config", "", "must name the run's TOML file, or flags must describe it", remedy)])
    if config_path and not taken.rest:  # no flags: the flag parser is not needed, and services start faster
        return load_resolved(Path(config_path))
    return load_config(config_path, taken.rest, prog=prog, description=f"{description}\n\n{CONFIG_HELP}")
