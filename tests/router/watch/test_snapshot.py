"""Snapshots of several processes add up, and what was counted never falls."""

import json

from services.router.watch.snapshot import cells_by_class, ended, merge
from tests.router.watch.passages import FakePassage, FakeWorker, FakeWorkers, observer_of


def test_snapshot_is_plain_json() -> None:
    worker = FakeWorker(policy_version=3)
    observer = observer_of(worker)
    observer.finished(FakePassage(worker, status=502, error="worker_broken"))
    snapshot = observer.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot


def test_processes_add_up_and_the_first_tells_of_the_registry() -> None:
    worker, other = FakeWorker(in_flight=5), FakeWorker("http://127.0.0.1:2")
    primary, second = observer_of(worker), observer_of(worker, other)
    second.process = "1"
    for observer in (primary, second, second):
        observer.finished(FakePassage(worker))
    second.finished(FakePassage(other, path_class="chat", error="worker_late", status=504))
    primary.workers = FakeWorkers([worker], waiting=2)
    second.workers = FakeWorkers([worker], waiting=3)
    second.connection_opened()
    merged = merge([primary.snapshot(), second.snapshot()])
    assert merged["cells"][worker.url]["generate"]["statuses"] == {"200": 3}
    assert merged["cells"][other.url]["chat"]["statuses"] == {"504": 1}
    assert (merged["errors"], merged["num_waiting"], merged["connections_opened"]) == ({"worker_late": 1}, 5, 1)
    assert (merged["workers"][worker.url]["in_flight"], set(merged["processes"])) == (5, {"0", "1"})


def test_merging_changes_nothing() -> None:
    worker = FakeWorker()
    observers = [observer_of(worker), observer_of(worker)]
    for observer in observers:
        observer.finished(FakePassage(worker, error="x", status=500))
    snapshots = [observer.snapshot() for observer in observers]
    before = json.dumps(snapshots)
    merge([*snapshots, *snapshots])
    assert json.dumps(snapshots) == before


def test_counts_of_a_process_that_ended_stay_and_its_connections_are_closed() -> None:
    worker = FakeWorker()
    primary, second = observer_of(worker), observer_of(worker)
    for observer in (primary, second):
        observer.finished(FakePassage(worker))
        observer.connection_opened()
    merged = merge([primary.snapshot(), ended(second.snapshot())])
    assert sum(cells_by_class(merged)["generate"]["total"]) == 2
    assert merged["connections_opened"] - merged["connections_closed"] == 1
    assert set(merged["processes"]) == {"0"}


def test_several_that_ended_are_kept_as_one() -> None:
    worker = FakeWorker()
    observer = observer_of(worker)
    observer.finished(FakePassage(worker))
    once = ended(observer.snapshot())
    thrice = merge([ended(merge([once, once])), observer.snapshot()])
    assert thrice["cells"][worker.url]["generate"]["statuses"] == {"200": 3}
