"""The router's numbers as rows of the metrics service, on the axis `router/time`: one every interval.

A step is the second, since 1970, in which its interval ends. What is told is of the interval: rates and quantiles come
from the difference of two snapshots. Never waits for the metrics service; tells nothing when there is none.
"""

import asyncio
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from furlong.records import Last, Value
from services.router.watch.buckets import quantile
from services.router.watch.finished import CLIENT_LEFT
from services.router.watch.snapshot import Snapshot, cells_by_class, merge, whole

AXIS = "router/time"
PART = "router"
INTERVAL_S = 10.0


class Recorder(Protocol):
    """What of furlong.telemetry.Telemetry is used."""

    def metrics(
        self, axis: str, step: int, values: Mapping[str, Value], *, part: str, parts: Sequence[str]
    ) -> None: ...


class Source(Protocol):
    """What of the Observer is used."""

    async def snapshots(self) -> list[Snapshot]: ...


class Reporter:
    """Makes the rows. `now`: monotonic seconds; `wall`: seconds since the epoch."""

    def __init__(
        self,
        source: Source,
        recorder: Recorder,
        *,
        interval_s: float = INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._recorder = recorder
        self._interval_s = interval_s
        self._now, self._wall = now, wall
        self._before: Snapshot | None = None
        self._before_at = 0.0
        self._step = 0

    async def run(self) -> None:
        """A row every interval, until cancelled."""
        while True:
            await self.report()
            await asyncio.sleep(self._interval_s)

    async def report(self) -> None:
        """The row of the time since the last call; the first call begins."""
        snapshot = merge(await self._source.snapshots())
        at = self._now()
        if self._before is not None and at > self._before_at:
            self._step = max(self._step + 1, int(self._wall()))  # a clock that was set back makes no row twice
            values = values_of(self._before, snapshot, seconds=at - self._before_at)
            row = {key: Last(value) for key, value in values.items()}
            self._recorder.metrics(AXIS, self._step, row, part=PART, parts=[PART])
        self._before, self._before_at = snapshot, at


def values_of(before: Snapshot, after: Snapshot, *, seconds: float) -> dict[str, float]:
    """The row of the time between two snapshots."""
    old, new = whole(cells_by_class(before).values()), whole(cells_by_class(after).values())
    finished = _difference(old["total"], new["total"])
    workers = after["workers"].values()
    errors = _num_errors(after) - _num_errors(before)
    retries = sum(after["retries"].values()) - sum(before["retries"].values())
    values: dict[str, float] = {
        "router/requests_per_s": sum(finished) / seconds,
        "router/errors_per_s": errors / seconds,
        "router/retries_per_s": retries / seconds,
        "router/received_bytes_per_s": (new["bytes_in"] - old["bytes_in"]) / seconds,
        "router/sent_bytes_per_s": (new["bytes_out"] - old["bytes_out"]) / seconds,
        "router/in_flight": sum(worker["in_flight"] for worker in workers),
        "router/queued": after["num_waiting"],
        "router/open_connections": after["connections_opened"] - after["connections_closed"],
        "router/ready_workers": sum(worker["state"] == "READY" for worker in workers),
        "router/registered_workers": len(after["workers"]),
        "router/loop_lag_s": max((process["loop_lag_s"] for process in after["processes"].values()), default=0.0),
    }
    first, queue = _difference(old["first"], new["first"]), _difference(old["queue"], new["queue"])
    for name, counts in (("latency", finished), ("first_byte", first), ("queue", queue)):
        for share in (50, 99):
            value = quantile(counts, share / 100)
            if value is not None:
                values[f"router/{name}_p{share}_s"] = value
    versions = [worker["policy_version"] for worker in workers if worker["policy_version"] is not None]
    if versions:
        values["router/policy_version_min"], values["router/policy_version_max"] = min(versions), max(versions)
    return values


def _num_errors(snapshot: Snapshot) -> int:
    """A client that goes away is no error of the router or a worker."""
    return sum(number for kind, number in snapshot["errors"].items() if kind != CLIENT_LEFT)


def _difference(old: list[int], new: list[int]) -> list[int]:
    return list(map(operator.sub, new, old))
