"""Prometheus text of many workers as one: every sample says whose it is, every family is described once. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LABEL = "worker"
EXPORTED = "exported_worker"
"""What an engine's own label of that name is called then."""
UP = "furlong_engine_up"

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{(.*)\}|[ \t])[ \t]*(\S+(?:[ \t]+-?[0-9]+)?)[ \t]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)')
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created", "_info", "_gsum", "_gcount")
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
    described: set[str] = set()
    for line in text.split("\n"):
        if line.startswith("#"):
            _describe(line, families, described)
        elif found := _SAMPLE.fullmatch(line):
            name, labels, value = found.groups()
            own = _labels(labels or "")
            if own is None or not _VALUE.fullmatch(value):
                continue
            family = families.setdefault(_family_of(name, described), _Family())
            family.samples.append(f"{name}{{{','.join((label, *own))}}} {value}")


def _describe(line: str, families: dict[str, _Family], described: set[str]) -> None:
    parts = line.split(None, 3)
    if len(parts) < 3 or parts[1] not in ("HELP", "TYPE") or not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", parts[2]):
        return
    family = families.setdefault(parts[2], _Family())
    described.add(parts[2])
    if parts[1] == "HELP":
        family.help = family.help or (parts[3] if len(parts) > 3 else "")
    else:
        family.kind = family.kind or (parts[3].strip() if len(parts) > 3 else "")


def _family_of(name: str, described: set[str]) -> str:
    if name in described:
        return name
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name[: -len(suffix)] in described:
            return name[: -len(suffix)]
    return name


def _labels(text: str) -> list[str] | None:
    """The labels one by one; None: they cannot be read."""
    pairs: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None:
            return None
        name = EXPORTED if found[1] == LABEL else found[1]
        pairs.append(f'{name}="{found[2]}"')
        at = found.end()
    return pairs


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
