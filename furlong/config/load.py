"""From a TOML file and flags to a resolved run.

Flags win over the file, the file over the defaults. Everything wrong is reported at once, each with key, value, rule
and remedy. Never reads the environment.
"""

import dataclasses
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from furlong.config.errors import ConfigError, Problem, is_secret_name
from furlong.config.flagwords import Tree, read_words
from furlong.config.miles import instead_of
from furlong.config.rules import check, resolve
from furlong.config.sections import Also, RunConfig


@dataclasses.dataclass(frozen=True)
class OwnFlag:
    """A flag of a command that is no field of a run: shown by --help and known to hints; the command takes it out."""

    name: str
    default: int | str
    help: str


def load_config(config_path: str | None, flags: Sequence[str], *, prog: str, description: str) -> RunConfig:
    """Read the file (if any), apply the flags, resolve and check.

    Raises ConfigError. `--help`, and a value that is not of its flag's type, print and raise SystemExit.
    """
    tree = read_toml(Path(config_path)) if config_path else {}
    _refuse_bad_fields(tree, source=config_path or "")
    return _build(read_flags(flags, tree=tree, prog=prog, description=description), source="")


def read_flags(
    flags: Sequence[str],
    *,
    tree: Tree,
    prog: str,
    description: str,
    offered: Mapping[str, Container[str]] | None = None,
    own: Sequence[OwnFlag] = (),
    prefix: str = "",
) -> Tree:
    """The tree of a file, with what the flags say laid over it; neither resolved nor checked between fields.

    offered: the only sections and fields that are taken. None: all. own: what the command has taken out of the flags.
    prefix: --help shows fields whose names begin so without it; the flags that are given here have it.
    Raises ConfigError and SystemExit as load_config.
    """
    _refuse_secrets(flags)
    _refuse_unknown(flags, own, prefix)
    if offered is not None and not {"-h", "--help"} & set(flags):
        return read_words(flags, tree=tree, offered=offered)
    return _parse_flags(tree, flags, prog=prog, description=description, offered=offered, own=own, prefix=prefix)


def load_resolved(path: Path) -> RunConfig:
    """Read a run that was written by `to_toml`, without flags. Raises ConfigError."""
    tree = read_toml(path)
    return _build(tree, source=str(path))


def read_toml(path: Path) -> Tree:
    """The file's content. Raises ConfigError naming the line when it is not TOML, or not readable."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([Problem("config", str(path), f"must be TOML: {error}", "Mend that line.")]) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        seen = "" if path.is_absolute() else f" (seen from {Path.cwd()})"
        raise ConfigError([Problem("config", str(path), f"must be a readable TOML file: {reason}{seen}")]) from error


def _build(tree: Tree, *, source: str) -> RunConfig:
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems_of(error), source=source) from error
    try:
        resolved = resolve(config)
    except ConfigError as error:
        raise ConfigError([*error.problems, *check(config)], source=source) from error
    if problems := check(resolved):
        raise ConfigError(problems, source=source)
    return resolved


def _refuse_bad_fields(tree: Tree, *, source: str) -> None:
    """Field-level faults of the file are told before flags are read, with the file's name."""
    try:
        RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems_of(error), source=source) from error


def _refuse_secrets(flags: Sequence[str]) -> None:
    """A secret on a command line can be read by everybody; it is refused here, before an error message repeats it."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and is_secret_name(name):
            remedy = "Set the environment variable instead, for wandb WANDB_API_KEY or WANDB_API_KEY_FILE."
            raise ConfigError([Problem(name, "", "no flag takes a secret: a command line can be read by all", remedy)])


def _refuse_unknown(flags: Sequence[str], own: Sequence[OwnFlag], prefix: str) -> None:
    """Words that are no flag and no flag's value, all at once, each with what was probably meant."""
    known = known_flags() | {flag.name: "value" for flag in own}
    if prefix:  # shown first: they are what a person meant
        long = prefix.replace("_", "-")
        known = {name.replace(long, "", 1): kind for name, kind in known.items() if long in name} | known
    problems = []
    flag, names_a_switch = "", False
    for word, following in zip(flags, [*flags[1:], ""], strict=False):
        if word.startswith("--"):
            flag, has_value, value = word.partition("=")
            name = flag.removeprefix("--").replace("_", "-")
            names_a_switch = known.get(name) == "switch"
            if name not in known:
                shown = value if has_value or following.startswith("--") else following
                problems.append(Problem(flag, shown, "is not a flag", _flag_suggestion(name, known)))
        elif names_a_switch:
            name = flag.removeprefix("--").removeprefix("no-")
            problems.append(Problem(flag, word, "takes no value", f"Give --{name} or --no-{name}."))
        elif not flag and word != "-h":
            problems.append(Problem("arguments", word, "is not a flag", _word_suggestion(word)))
    if problems:
        raise ConfigError(problems)


def known_flags() -> dict[str, str]:
    """Every flag of a run, without its dashes, and whether it takes a value or is a switch."""
    known = {"help": "switch"}
    for info in RunConfig.model_fields.values():
        for field, field_info in _section_class(info).model_fields.items():
            kind = "switch" if field_info.annotation is bool else "value"
            names = [field.replace("_", "-"), *_other_names(field_info)]
            known |= dict.fromkeys(names, kind)
            if kind == "switch":
                known |= {f"no-{name}": kind for name in names}
    return known


def _flag_suggestion(name: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, [*known, "config"], n=1, cutoff=0.75)
    if not (said := instead_of(name)) and close:
        return f"Did you mean --{close[0]}?"
    return said or "--help lists all flags."


def _word_suggestion(word: str) -> str:
    return f"Did you mean --config {word}?" if word.endswith(".toml") else "--help lists all flags."


def problems_of(error: ValidationError) -> list[Problem]:
    """What pydantic found, in our words."""
    problems = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            problems.append(Problem(key, item["input"], "is not a known key", _suggestion(key)))
            continue
        rule = item["msg"][0].lower() + item["msg"][1:]
        problems.append(Problem(key, item["input"], rule.replace("input should", "must")))
    return problems


def _suggestion(key: str) -> str:
    """The known key that is closest to an unknown one, in its section or in another."""
    import difflib

    section, _, name = key.rpartition(".")
    known = {f: s for s, info in RunConfig.model_fields.items() for f in _section_class(info).model_fields}
    if not section:
        close = difflib.get_close_matches(name, list(RunConfig.model_fields), n=1)
        if name in known:
            return f"It belongs into the section [{known[name]}]."
        return f"Did you mean the section [{close[0]}]?" if close else f"Sections: {', '.join(RunConfig.model_fields)}."
    if name in known:
        return f"It belongs into the section [{known[name]}]."
    if said := instead_of(name):
        return said
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {known[close[0]]}.{close[0]}?" if close else "`furlong config --help` lists all keys."


def _section_class(info: FieldInfo) -> type[BaseModel]:
    assert isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    return info.annotation


def _parse_flags(
    tree: Tree,
    flags: Sequence[str],
    *,
    prog: str,
    description: str,
    offered: Mapping[str, Container[str]] | None,
    own: Sequence[OwnFlag],
    prefix: str,
) -> Tree:
    """The file's tree with the flags laid over it; only fields that were given are in it.

    tyro sees plain dataclasses made from the sections, so that it parses and documents while pydantic alone judges.
    """
    import tyro

    defaults = RunConfig.model_validate(tree)
    sections = {"service": _own_section(own)} if own else {}
    for name, info in RunConfig.model_fields.items():
        if offered is not None and name not in offered:
            continue
        model = _section_class(info)
        fields = [
            (
                field,
                _flag_type(field_info, name=field.removeprefix(prefix).replace("_", "-")),
                dataclasses.field(default=getattr(getattr(defaults, name), field)),
            )
            for field, field_info in model.model_fields.items()
            if offered is None or field in offered[name]
        ]
        twin = dataclasses.make_dataclass(name, fields, frozen=True, kw_only=True)
        twin.__doc__ = model.__doc__
        sections[name] = twin
    root = dataclasses.make_dataclass("Flags", [(name, twin, twin()) for name, twin in sections.items()], frozen=True)
    long = prefix.replace("_", "-")
    words = [
        word.replace(long, "", 1) if long and word.startswith((f"--{long}", f"--no-{long}")) else word for word in flags
    ]
    parsed = tyro.cli(tyro.conf.OmitArgPrefixes[root], args=words, prog=prog, description=description)
    return _overlay(tree, flags, parsed)


def _own_section(own: Sequence[OwnFlag]) -> type:
    import tyro

    fields: list[Any] = [  # Any: make_dataclass's own form
        (
            flag.name,
            Annotated[type(flag.default), tyro.conf.arg(help=flag.help)],  # type: ignore[invalid-annotation]
            dataclasses.field(default=flag.default),
        )
        for flag in own
    ]
    section = dataclasses.make_dataclass("service", fields, frozen=True, kw_only=True)
    section.__doc__ = "Where it listens, and what it keeps."
    return section


def _overlay(tree: Tree, flags: Sequence[str], parsed: object) -> Tree:
    """The file's tree, and over it the value of each field that a flag names, be it the default's.

    A flag that names a reward takes the place of the file's reward of the other kind.
    """
    named = {flag.partition("=")[0].removeprefix("--").replace("_", "-") for flag in flags if flag.startswith("--")}
    merged: Tree = {name: dict(section) for name, section in tree.items()}
    if len(named & {"rm-type", "custom-rm-path"}) == 1:
        merged.get("rollout", {}).pop("custom_rm_path" if "rm-type" in named else "rm_type", None)
    for name, info in RunConfig.model_fields.items():
        for field, field_info in _section_class(info).model_fields.items():
            kebab = field.replace("_", "-")
            if named & {kebab, f"no-{kebab}", *_other_names(field_info)}:
                merged.setdefault(name, {})[field] = getattr(getattr(parsed, name), field)
    return merged


def _other_names(info: FieldInfo) -> list[str]:
    """Other flag names of a field, without the dashes before them."""
    return [name for item in info.metadata if isinstance(item, Also) for name in item.names]


def _flag_type(info: FieldInfo, *, name: str) -> Any:  # Any: a type expression
    """The field's annotation for tyro: constraints off, name, documentation and other names on.

    `None` takes a value away, which the help says once for all flags.
    """
    import tyro

    also = [f"--{name}" for name in _other_names(info)]
    plain, choices = _plain(info.annotation), _optional_choices(info.annotation)
    described = tyro.conf.arg(
        name=name,
        help=" ".join((info.description or "").split()),
        aliases=also or None,
        metavar=f"{{{','.join(choices)}}}" if choices else _optional_metavar(plain),
        help_behavior_hint=lambda default: "" if default in ("None", "''", "") else f"(default: {default})",
    )
    return Annotated[str | None if choices else plain, described]  # type: ignore[invalid-annotation]


def _optional_choices(annotation: Any) -> tuple[str, ...]:  # Any: a type expression
    """The words of `Literal[...] | None`, which pydantic judges with a better message than the flag parser."""
    arguments = get_args(annotation)
    literals = [get_args(argument) for argument in arguments if get_origin(argument) is Literal]
    return literals[0] if type(None) in arguments and literals else ()


def _optional_metavar(plain: Any) -> str | None:  # Any: a type expression
    """What the help shows for the value of `int | None` and the like; None: what the flag parser would show."""
    kinds = [argument for argument in get_args(plain) if argument is not type(None)]
    return kinds[0].__name__.upper() if type(None) in get_args(plain) else None


def _plain(annotation: Any) -> Any:  # Any: type expressions in and out
    """The annotation without pydantic's constraints, which tyro need not see."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain(get_args(annotation)[0])
    if origin is tuple:
        return tuple[tuple(_plain(arg) for arg in get_args(annotation))]  # type: ignore[invalid-annotation]
    if type(annotation).__name__ == "UnionType" or str(origin) == "typing.Union":
        union = None
        for arg in get_args(annotation):
            plain = _plain(arg)
            union = plain if union is None else union | plain
        return union
    return annotation
