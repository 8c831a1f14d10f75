"""The counters as plain numbers, lists and dicts that JSON can hold, and the sum of those of several processes. Pure.

    {"cells": {URL: {PATH CLASS: {"statuses": {"200": 3}, "bytes_in": ..., "total": [...], "total_s": ..., ...}}},
     "gone": {PATH CLASS: {...}},                       what workers had that left; URL "" above: no worker got it
     "of_worker": {URL: {"errors": {KIND: 1}, "probes_good": ..., ...}},
     "errors": {KIND: 1}, "retries": {KIND: 1}, "probes_good": 1, "probes_bad": 0,
     "connections_opened": 9, "connections_closed": 4,
     "num_waiting": 0, "workers": {URL: {"state": "READY", "in_flight": 2, ...}}, "shown": [URL],
     "processes": {"0": {"pid": ..., "resident_bytes": ..., ...}}}

Counts add up. What is true of the registry (`workers`) is said by the process that owns it; requests that wait and open
connections add up. The counts of a process that ended stay (`ended`), since a sum that falls would read as a restart.
"""

import copy
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from services.router.watch.counters import Cell, OfWorker

Snapshot = dict[str, Any]  # Any: JSON's own open tree
COUNTED = (
    "cells", "gone", "of_worker", "errors", "retries", "probes_good", "probes_bad", "connections_opened",
    "connections_closed", "process_restarts",
)  # fmt: skip
"""What only grows."""


class Counted(Protocol):
    """The Observer's numbers."""

    cells: dict[tuple[str, str], Cell]
    gone: dict[str, Cell]
    of_worker: dict[str, OfWorker]
    errors: dict[str, int]
    retries: dict[str, int]
    probes_good: int
    probes_bad: int
    connections_opened: int
    connections_closed: int


def counts_of(counted: Counted) -> Snapshot:
    """A copy of everything that is counted."""
    cells: dict[str, dict[str, Snapshot]] = {}
    for (url, path_class), cell in counted.cells.items():
        cells.setdefault(url, {})[path_class] = cell_view(cell)
    return {
        "cells": cells,
        "gone": {path_class: cell_view(cell) for path_class, cell in counted.gone.items()},
        "of_worker": {url: _of_worker_view(one) for url, one in counted.of_worker.items()},
        "errors": dict(counted.errors),
        "retries": dict(counted.retries),
        "probes_good": counted.probes_good,
        "probes_bad": counted.probes_bad,
        "connections_opened": counted.connections_opened,
        "connections_closed": counted.connections_closed,
    }


def worker_views(workers: Iterable[Any]) -> dict[str, Snapshot]:  # Any: a Worker, as it is
    """What there is to say of each worker now, by address."""
    return {
        str(worker.url): {
            "state": worker.state.name,
            "in_flight": worker.in_flight,
            "policy_version": worker.policy_version,
            "breaker": worker.breaker.state,
        }
        for worker in workers
    }


def merge(snapshots: Sequence[Snapshot]) -> Snapshot:
    """One snapshot of several processes, the registry's owner first. Changes none of them."""
    merged: Snapshot = {"num_waiting": 0, "workers": {}, "shown": [], "processes": {}}
    for snapshot in snapshots:
        for key in COUNTED:
            if key in snapshot:
                merged[key] = _sum(merged.get(key), snapshot[key])
        merged["num_waiting"] += snapshot.get("num_waiting", 0)
        merged["workers"] = merged["workers"] or snapshot.get("workers", {})
        merged["shown"] = sorted({*merged["shown"], *snapshot.get("shown", ())})
        merged["processes"].update(snapshot.get("processes", {}))
    return merged


def ended(snapshot: Snapshot) -> Snapshot:
    """What stays of the snapshot of a process that is no more: its counts. Its connections are closed."""
    kept = {key: copy.deepcopy(snapshot[key]) for key in COUNTED if key in snapshot}
    kept["connections_closed"] = kept.get("connections_opened", 0)
    return kept


def cells_by_class(snapshot: Snapshot) -> dict[str, Snapshot]:
    """The sum over all workers there ever were, by path class."""
    found: dict[str, Snapshot] = {}
    for cells in (snapshot["gone"], *snapshot["cells"].values()):
        for path_class, cell in cells.items():
            found[path_class] = _sum(found.get(path_class), cell)
    return found


def whole(cells: Iterable[Snapshot]) -> Snapshot:
    """The sum of cells; of none: one in which nothing is counted."""
    total: Snapshot = cell_view(Cell())
    for cell in cells:
        total = _sum(total, cell)
    return total


def cell_view(cell: Cell) -> Snapshot:
    """A copy of a cell."""
    return {
        "statuses": {str(status): number for status, number in cell.statuses.items()},
        "bytes_in": cell.bytes_in,
        "bytes_out": cell.bytes_out,
        "total": list(cell.total),
        "total_s": cell.total_s,
        "first": list(cell.first),
        "first_s": cell.first_s,
        "queue": list(cell.queue),
        "queue_s": cell.queue_s,
    }


def _of_worker_view(of_worker: OfWorker) -> Snapshot:
    return {
        "errors": dict(of_worker.errors),
        "probes_good": of_worker.probes_good,
        "probes_bad": of_worker.probes_bad,
        "probe_s": of_worker.probe_s,
    }


def _sum(one: Any, other: Any) -> Any:  # Any: trees of numbers, lists and dicts of one shape
    """Both, number by number; what only one has is as it is there. Shares nothing with `other` that it may change."""
    if one is None:
        return other
    if isinstance(one, dict):
        return {**one, **{key: _sum(one.get(key), value) for key, value in other.items()}}
    if isinstance(one, list):
        return list(map(operator.add, one, other))
    return one + other
