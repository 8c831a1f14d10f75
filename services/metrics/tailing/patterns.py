"""The files that paths and globs name: now, and later again.

Links to folders are not walked into, so that no circle of them is walked for ever.
"""

import glob
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".Z")
"""Rotated and packed: what is in them was read before."""


def expand(patterns: Iterable[str]) -> dict[str, os.stat_result]:
    """The regular files that match now, by absolute path. What cannot be looked at is left out."""
    found: dict[str, os.stat_result] = {}
    for pattern in patterns:
        for path in _matches(pattern):
            if path in found or path.endswith(COMPRESSED):
                continue
            try:
                known = os.stat(path)
            except OSError:
                continue
            if stat.S_ISREG(known.st_mode):
                found[path] = known
    return found


def is_related(name: str, other: str) -> bool:
    """Whether another name in the same folder looks like that of a rotated file: `app.log` and `app.log.1`,
    `app-20261129.log`.
    """
    return other != name and any(
        other.startswith(stem) and other[len(stem) : len(stem) + 1] in (".", "-", "_", "~", "@")
        for stem in {name, name.rsplit(".", 1)[0]}
    )


def _matches(pattern: str) -> Iterator[str]:
    path = os.path.abspath(os.path.expanduser(pattern))
    if not glob.has_magic(path):
        yield path
        return
    parts = Path(path).parts
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    base = Path(*parts[:first])
    try:
        for match in base.glob(str(Path(*parts[first:]))):
            yield str(match)
    except (OSError, ValueError):  # a folder went away, or may not be read; `a**b` is no glob
        return
