"""Histograms and tables of rows, by key: what is no curve. Pure but for the store that it asks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from furlong.asking.store import StoreReader

KINDS = {"histograms": "histogram", "tables": "table"}
MAX_OBJECTS = 1_000
"""Steps of one key, at most."""
_LISTED_ROWS = 1_000

Tree = dict[str, Any]  # Any: JSON


@dataclass(frozen=True)
class RowObject:
    """One key at one step."""

    run: str
    axis: str
    key: str
    kind: str
    step: int
    attempt: int
    value: Tree
    """As it stands in the row: edges and counts, or columns and rows."""


def objects_of(
    store: StoreReader, keys: Sequence[str], *, run: str | None, last: int, attempt: int | None = None
) -> list[RowObject]:
    """The newest of each key, oldest first, in the order of the keys."""
    found: list[RowObject] = []
    for key in keys:
        needle = orjson.dumps(key) + b":{"
        bodies = store.rows_that_hold([needle], run=run, attempt=attempt, last=last)
        found += [item for body in bodies for item in _of_row(body) if item.key == key]
    return found


def newest_objects(store: StoreReader, *, run: str | None) -> list[RowObject]:
    """The newest of each key that the last rows have, by run, axis and key."""
    needles = [b'"%s":{' % name.encode() for name in KINDS]
    bodies = store.rows_that_hold(needles, run=run, attempt=None, last=_LISTED_ROWS)
    newest = {(item.run, item.axis, item.key): item for body in bodies for item in _of_row(body)}
    return [newest[place] for place in sorted(newest)]


def _of_row(body: bytes) -> Iterator[RowObject]:
    row = orjson.loads(body)
    for name, kind in KINDS.items():
        for key, value in row.get(name, {}).items():
            yield RowObject(row["run"], row["axis"], key, kind, row["step"], row["attempt"], value)
