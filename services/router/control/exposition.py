"""Prometheus text of many workers as one: every sample says whose it is, every family is described once. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LABEL = "worker"
EXPORTED = "exported_worker"
"""What an engine's own label of that name is called then."""
UP = "furlong_engine_up"

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{(.*)\}|[ \t])[ \t]*(\S+(?:[ \t]+-?[0-9]+)?)[ \t]*")
_ONE_LABEL = r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)'
_LABEL = re.compile(_ONE_LABEL)
_LABELS = re.compile(rf"(?:{_ONE_LABEL})*[ \t]*")
_SUFFIXES = ("_bucket", "_sum", "_count")
_WITH_SUFFIXES = ("histogram", "summary")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_VALUE = re.compile(r"[+-]?(?:[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+\.|Inf|NaN|inf|nan)(?:[ \t]+-?[0-9]+)?")


@dataclass
class _Family:
    """One metric, of all workers."""

    help: str = ""
    kind: str = ""
    samples: list[str] = field(default_factory=list)


def join(texts: Mapping[str, str], *, down: Iterable[str] = ()) -> str:
    """One exposition out of the text of each worker. down: workers that gave none.

    A line that is no sample is left out: one engine's bad line must not cost the figures of all.
    """
    families: dict[str, _Family] = {}
    for text in texts.values():  # first what all of them describe, so that a name has one place whoever says it
        for line in text.split("\n"):
            if line.startswith("#"):
                _describe(line, families)
    for worker, text in texts.items():
        _read(text, f'{LABEL}="{_escaped(worker)}"', families)
    up = _Family(help="Whether an engine gave its metrics.", kind="gauge")
    up.samples = [f'{UP}{{{LABEL}="{_escaped(worker)}"}} 1' for worker in texts]
    up.samples += [f'{UP}{{{LABEL}="{_escaped(worker)}"}} 0' for worker in down]
    families.pop(UP, None)
    families[UP] = up
    lines: list[str] = []
    for name, family in families.items():
        if family.samples:
            lines += [f"# HELP {name} {family.help}"] if family.help else []
            lines += [f"# TYPE {name} {family.kind}"] if family.kind else []
            lines += family.samples
    return "\n".join(lines) + "\n"


def _read(text: str, label: str, families: dict[str, _Family]) -> None:
    for line in text.split("\n"):
        if found := _SAMPLE.fullmatch(line):
            name, labels, value = found.groups()
            own = _labels(labels or "")
            if own is not None and _VALUE.fullmatch(value):
                family = families.setdefault(_family_of(name, families), _Family())
                family.samples.append(f"{name}{{{label},{own}}} {value}" if own else f"{name}{{{label}}} {value}")


def _describe(line: str, families: dict[str, _Family]) -> None:
    parts = line.split(None, 3)
    if len(parts) < 4 or parts[1] not in ("HELP", "TYPE") or not _NAME.fullmatch(parts[2]):
        return
    family = families.setdefault(parts[2], _Family())
    if parts[1] == "HELP":
        family.help = family.help or parts[3]
    else:
        family.kind = family.kind or parts[3].strip()


def _family_of(name: str, families: Mapping[str, _Family]) -> str:
    for suffix in _SUFFIXES:
        base = families.get(name.removesuffix(suffix)) if name.endswith(suffix) and name not in families else None
        if base is not None and base.kind in _WITH_SUFFIXES:
            return name.removesuffix(suffix)
    return name


def _labels(text: str) -> str | None:
    """The labels of a sample as they go on; None: they cannot be read."""
    if not _LABELS.fullmatch(text):
        return None
    if LABEL in text:
        pairs = (found.groups() for found in _LABEL.finditer(text))
        return ",".join(f'{EXPORTED if name == LABEL else name}="{value}"' for name, value in pairs)
    return text.strip(" \t,")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
