"""What of a row is new to who shows it: the numbers, histograms and tables that it did not say before. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any  # Any: a histogram's or table's JSON

import orjson

from services.metrics.rows import Row


@dataclass(frozen=True)
class Drawn:
    """One row, read."""

    row_id: int
    run: str
    axis: str
    step: int
    attempt: int
    time_us: int
    """When the service handed it on, microseconds since the epoch: the same at every reading."""
    values: Mapping[str, float]
    """NaN and infinities as they are."""
    histograms: Mapping[str, Any]
    tables: Mapping[str, Any]


def drawn(row: Row) -> Drawn | None:
    """None: there is nothing to show, as a newer attempt took its place, or it amends nothing that is shown."""
    if not row.is_current:
        return None
    return read_row(row.row_id, row.emitted_us, orjson.loads(row.body), orjson.loads(row.prior) if row.prior else None)


def read_row(row_id: int, time_us: int, body: Mapping[str, Any], prior: Mapping[str, Any] | None) -> Drawn | None:
    """The same, of parsed rows."""
    values = changed(body, prior, "values")
    histograms, tables = changed(body, prior, "histograms"), changed(body, prior, "tables")
    if not values and not histograms and not tables:
        return None
    numbers = {name: float(value) for name, value in values.items()}  # the strings for NaN and infinities too
    return Drawn(row_id, body["run"], body["axis"], body["step"], body["attempt"], time_us, numbers, histograms, tables)


def changed(body: Mapping[str, Any], prior: Mapping[str, Any] | None, part: str) -> Mapping[str, Any]:
    """What of `values`, `histograms` or `tables` was not said before."""
    now = body.get(part, {})
    before = prior.get(part, {}) if prior else {}
    return {name: value for name, value in now.items() if name not in before or before[name] != value}
