"""What is counted of requests, and that neither clients nor workers can make more counters than there are."""

import timeit

from services.router.watch.counters import MAX_KINDS
from services.router.watch.observer import FORGET_AFTER_S
from tests.router.watch.passages import Clock, FakePassage, FakeWorker, FakeWorkers, observer_of


def test_request_is_counted_once_everywhere() -> None:
    worker = FakeWorker()
    observer = observer_of(worker)
    observer.finished(FakePassage(worker, queued_s=0.5))
    cell = observer.snapshot()["cells"][worker.url]["generate"]
    assert (cell["statuses"], cell["bytes_in"], cell["bytes_out"]) == ({"200": 1}, 10, 20)
    assert [sum(cell[name]) for name in ("total", "first", "queue")] == [1, 1, 1]
    assert (round(cell["total_s"], 6), round(cell["first_s"], 6), cell["queue_s"]) == (0.04, 0.004, 0.5)


def test_request_that_got_no_worker_and_no_byte_is_counted_under_neither() -> None:
    observer = observer_of()
    observer.finished(FakePassage(status=503, error="queue_full", first_byte=0.0, sent=0.0))
    snapshot = observer.snapshot()
    cell = snapshot["cells"][""]["generate"]
    assert (cell["statuses"], sum(cell["first"]), sum(cell["total"])) == ({"503": 1}, 0, 1)
    assert (snapshot["errors"], snapshot["shown"]) == ({"queue_full": 1}, [])


def test_what_the_router_answers_itself_has_no_time_of_a_worker() -> None:
    observer = observer_of()
    observer.finished(FakePassage(path_class="control", first_byte=100.0))
    cell = observer.snapshot()["cells"][""]["control"]
    assert (sum(cell["first"]), cell["first_s"], sum(cell["total"])) == (0, 0.0, 1)


def test_worker_that_registers_again_goes_on_counting() -> None:
    first, second = FakeWorker(), FakeWorker()
    observer = observer_of(first)
    observer.finished(FakePassage(first))
    observer.workers = FakeWorkers([second])
    observer.finished(FakePassage(second))
    observer.finished(FakePassage(first))
    assert observer.snapshot()["cells"][first.url]["generate"]["statuses"] == {"200": 3}


def test_worker_that_left_keeps_its_series_for_a_while_and_its_share_of_the_sum_for_ever() -> None:
    clock, worker = Clock(), FakeWorker()
    observer = observer_of(worker, now=clock)
    observer.finished(FakePassage(worker))
    observer.workers = FakeWorkers()
    observer.forget_gone()
    clock.at += FORGET_AFTER_S
    assert observer.snapshot()["shown"] == [worker.url]
    clock.at += 1
    snapshot = observer.snapshot()
    assert (snapshot["shown"], snapshot["cells"], snapshot["of_worker"]) == ([], {}, {})
    assert snapshot["gone"]["generate"]["statuses"] == {"200": 1}


def test_worker_that_is_back_in_time_keeps_its_series() -> None:
    clock, worker = Clock(), FakeWorker()
    observer = observer_of(now=clock)
    observer.finished(FakePassage(worker))
    for _ in range(5):
        observer.workers = FakeWorkers()
        observer.forget_gone()
        clock.at += FORGET_AFTER_S - 1
        observer.workers = FakeWorkers([worker])
        observer.forget_gone()
    assert observer.snapshot()["shown"] == [worker.url]


def test_thousands_of_workers_that_come_and_go_leave_nothing_but_the_sum() -> None:
    clock = Clock()
    observer = observer_of(now=clock)
    for number in range(3000):
        worker = FakeWorker(f"http://10.0.0.1:{number + 1}")
        observer.workers = FakeWorkers([worker])
        observer.finished(FakePassage(worker))
        observer.probe(worker, True, 0.01)
        observer.forget_gone()
        clock.at += FORGET_AFTER_S + 1
    assert len(observer.cells) <= 2 and len(observer.of_worker) <= 2 and len(observer._by_worker) <= 2
    assert observer.gone["generate"].statuses[200] >= 2998


def test_odd_statuses_classes_and_kinds_share_counters() -> None:
    observer = observer_of()
    for number in range(100, 1000):
        observer.finished(FakePassage(status=number, path_class=f"/any/{number}", error=f"kind {number}"))
        observer.retry(f"why {number}")
    snapshot = observer.snapshot()
    assert list(snapshot["cells"][""]) == ["other"]
    statuses = snapshot["cells"][""]["other"]["statuses"]
    assert len(statuses) < 70 and sum(statuses.values()) == 900 and statuses["-1"] > 800
    assert len(snapshot["errors"]) == len(snapshot["retries"]) == MAX_KINDS + 1
    assert sum(snapshot["errors"].values()) == 900


def test_probes_and_connections_are_counted() -> None:
    worker = FakeWorker()
    observer = observer_of(worker)
    observer.probe(worker, True, 0.25)
    observer.probe(worker, False, 0.5)
    observer.connection_opened()
    observer.connection_opened()
    observer.connection_closed()
    snapshot = observer.snapshot()
    of_worker = {"errors": {}, "probes_good": 1, "probes_bad": 1, "probe_s": 0.75}
    assert snapshot["of_worker"] == {worker.url: of_worker}
    assert (snapshot["connections_opened"], snapshot["connections_closed"]) == (2, 1)


def test_a_request_costs_two_microseconds_at_most() -> None:
    worker = FakeWorker()
    observer = observer_of(worker, access_log_every=1_000_000)
    passage = FakePassage(worker)
    cost_s = min(timeit.repeat(lambda: observer.finished(passage), number=5_000, repeat=10)) / 5_000
    assert cost_s < 2e-6, f"{cost_s * 1e6:.2f} us"
