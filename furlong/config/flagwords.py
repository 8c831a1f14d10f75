"""Flags read without the flag parser, which takes memory and time that a small service need not spend. Pure.

pydantic judges the values; words that are no flags have been refused before.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from furlong.config.errors import ConfigError, Problem
from furlong.config.sections import Also, RunConfig

Tree = dict[str, Any]  # Any: what a flag may hold, before it is validated


def read_words(flags: Sequence[str], *, tree: Tree, offered: Mapping[str, Container[str]]) -> Tree:
    """The tree with what the flags say laid over it. offered: section -> fields. Raises ConfigError."""
    known = _known(offered)
    merged: Tree = {name: dict(section) for name, section in tree.items()}
    problems = []
    words = list(flags)
    while words:
        flag, has_value, value = words.pop(0).partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        section, field, info = known.get(name) or known[name.removeprefix("no-")]
        given = [value] if has_value else []
        while words and not words[0].startswith("--"):
            given.append(words.pop(0))
        if info.annotation is bool:
            merged.setdefault(section, {})[field] = not name.startswith("no-")
        elif get_origin(info.annotation) is tuple:
            merged.setdefault(section, {})[field] = given
        elif len(given) != 1:
            rule = "must be given a value" if not given else "must be given one value"
            problems.append(Problem(flag, " ".join(given), rule))
        else:
            is_optional = type(None) in get_args(info.annotation)
            merged.setdefault(section, {})[field] = None if is_optional and given == ["None"] else given[0]
    if problems:
        raise ConfigError(problems)
    return merged


def _known(offered: Mapping[str, Container[str]]) -> dict[str, tuple[str, str, FieldInfo]]:
    """Flag without dashes -> section, field."""
    known = {}
    defaults = RunConfig()
    for section, fields in offered.items():
        for field, info in type(getattr(defaults, section)).model_fields.items():
            if field in fields:
                others = [name for item in info.metadata if isinstance(item, Also) for name in item.names]
                known |= dict.fromkeys([field.replace("_", "-"), *others], (section, field, info))
    return known
