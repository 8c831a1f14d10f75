"""The rows that the router sends to the metrics service."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from furlong.records import AXES, Last, Value, reduce_value
from services.router.watch.reporting import AXIS, Reporter, values_of
from services.router.watch.snapshot import merge
from services.router.watch.watching import watching
from tests.router.waiting import eventually
from tests.router.watch.passages import Clock, FakePassage, FakeWorker, FakeWorkers, observer_of


class Rows:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, Mapping[str, Value]]] = []

    def metrics(self, axis: str, step: int, values: Mapping[str, Value], *, part: str, parts: Sequence[str]) -> None:
        assert [part] == list(parts)
        self.rows.append((axis, step, values))


async def test_row_tells_of_its_interval_alone() -> None:
    clock, worker, rows = Clock(), FakeWorker(in_flight=2, policy_version=5), Rows()
    observer = observer_of(worker, FakeWorker("http://b:1", SimpleNamespace(name="UNREADY"), policy_version=4))
    reporter = Reporter(observer, rows, now=clock, wall=lambda: 1_700_000_000.9)
    observer.finished(FakePassage(worker, ended=900.0))
    await reporter.report()
    for _ in range(20):
        observer.finished(FakePassage(worker))
    observer.finished(FakePassage(worker, 502, error="worker_broken"))
    observer.finished(FakePassage(worker, 0, error="client_left"))
    observer.retry("worker_broken")
    clock.at += 10
    await reporter.report()
    [(axis, step, row)] = rows.rows
    values = {key.removeprefix("router/"): reduce_value(value) or 0.0 for key, value in row.items()}
    assert (axis, step) == (AXIS, 1_700_000_000) and AXIS in AXES
    assert (values["requests_per_s"], values["errors_per_s"], values["retries_per_s"]) == (2.2, 0.1, 0.1)
    assert (values["in_flight"], values["ready_workers"], values["registered_workers"]) == (2, 1, 2)
    assert (values["policy_version_min"], values["policy_version_max"]) == (4, 5)
    assert 0.02 < values["latency_p99_s"] <= 0.05 and 0.002 < values["first_byte_p50_s"] <= 0.005
    assert "queue_p50_s" not in values


async def test_clock_that_is_set_back_makes_no_step_twice() -> None:
    clock, rows, walls = Clock(), Rows(), iter((100.0, 50.0, 200.0))
    reporter = Reporter(observer_of(), rows, now=clock, wall=lambda: next(walls))
    for _ in range(4):
        await reporter.report()
        clock.at += 1
    assert [step for _, step, _ in rows.rows] == [100, 101, 200]


def test_every_value_is_a_finite_number() -> None:
    observer = observer_of()
    snapshot = merge([observer.snapshot()])
    assert all(math.isfinite(value) for value in values_of(snapshot, snapshot, seconds=1.0).values())


async def test_rows_come_while_watching_and_one_at_the_end() -> None:
    rows, observer = Rows(), observer_of()
    observer.workers = FakeWorkers([FakeWorker()])
    async with watching(observer, rows, interval_s=0.01):
        await eventually(lambda: len(rows.rows) >= 2, "rows")
        before = len(rows.rows)
        observer.finished(FakePassage())
    assert len(rows.rows) > before
    assert sum(
        row["router/requests_per_s"].value > 0
        for _, _, row in rows.rows
        if isinstance(row["router/requests_per_s"], Last)
    )
