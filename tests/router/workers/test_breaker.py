"""Circuit breakers, as the choice uses them."""

from collections import Counter

import pytest

from services.router.workers.want import ANY, Want
from services.router.workers.workers import Worker, Workers
from tests.router.workers.clock import Clock, ready, workers_at


def opened(workers: Workers, port: int) -> Worker:
    worker = ready(workers, port)
    for _ in range(3):
        workers.failed(worker, "answered 500")
    assert worker.breaker_state == "open"
    return worker


def taken(workers: Workers, want: Want = ANY) -> Worker:
    worker = workers.take(want)
    assert worker is not None
    return worker


def test_a_worker_that_fails_at_once_does_not_draw_the_load() -> None:
    clock = Clock()
    workers = workers_at(clock)
    bad, good = ready(workers, 1), ready(workers, 2)
    counts: Counter[Worker] = Counter()
    for _ in range(1000):
        worker = taken(workers)
        counts[worker] += 1
        workers.answered(worker, 500 if worker is bad else 200)
        workers.give_back(worker)
        clock.go_on(0.01)
    assert counts[bad] == 3 + 4, "three failures open it; then one request each pause of 2 s in 10 s"
    assert counts[good] == 993


def test_one_request_at_a_time_tries_an_open_worker() -> None:
    clock = Clock()
    workers = workers_at(clock)
    bad, _ = opened(workers, 1), ready(workers, 2)
    clock.go_on(2)
    first = [taken(workers) for _ in range(5)]
    assert first.count(bad) == 1 and bad.breaker_state == "half-open"
    workers.answered(bad, 200)
    workers.give_back(bad)
    assert bad.breaker_state == "closed" and taken(workers) is bad


def test_a_failed_try_opens_it_for_another_pause() -> None:
    clock = Clock()
    workers = workers_at(clock)
    bad, good = opened(workers, 1), ready(workers, 2)
    clock.go_on(2)
    assert taken(workers) is bad
    workers.failed(bad, "broke off")
    workers.give_back(bad)
    clock.go_on(1.9)
    assert [taken(workers) for _ in range(3)] == [good] * 3
    clock.go_on(0.2)
    assert taken(workers) is bad


def test_a_try_whose_client_left_proves_nothing() -> None:
    clock = Clock()
    workers = workers_at(clock)
    bad, good = opened(workers, 1), ready(workers, 2)
    clock.go_on(2)
    assert taken(workers) is bad
    workers.give_back(bad)
    assert bad.breaker_state == "open" and taken(workers) is good
    clock.go_on(2)
    assert taken(workers) is bad


def test_when_all_are_open_all_are_used() -> None:
    workers = workers_at(Clock())
    both = {opened(workers, 1), opened(workers, 2)}
    assert {taken(workers), taken(workers)} == both


def test_an_open_one_is_better_than_none_for_a_request_that_tried_the_others() -> None:
    workers = workers_at(Clock())
    bad, good = opened(workers, 1), ready(workers, 2)
    assert workers.take(but_not=[good]) is bad


@pytest.mark.parametrize("policy", ["least-in-flight", "round-robin", "power-of-two", "session"])
def test_no_policy_goes_to_an_open_worker(policy: str) -> None:
    workers = workers_at(Clock(), policy=policy)
    opened(workers, 1)
    good = {ready(workers, 2), ready(workers, 3)}
    assert {taken(workers, Want(session=b"%d" % n)) for n in range(100)} == good


def test_sessions_come_home_when_the_breaker_closes() -> None:
    clock = Clock()
    workers = workers_at(clock, policy="session", breaker_pause_s=0.5)
    everyone = [ready(workers, port) for port in (1, 2, 3)]
    want = Want(session=b"a conversation")
    home = taken(workers, want)
    workers.give_back(home)
    for _ in range(3):
        workers.failed(home, "answered 500")
    away = taken(workers, want)
    workers.give_back(away)
    assert away is not home and away in everyone
    workers.probe_failed(home, "x")
    clock.go_on(0.5)
    assert taken(workers, want) is home
    workers.answered(home, 200)
    workers.give_back(home)
    assert taken(workers, want) is home


def test_what_clients_do_wrong_does_not_count() -> None:
    workers = workers_at(Clock())
    worker = ready(workers)
    for status in (400, 404, 422, 429) * 5:
        workers.answered(worker, status)
    assert worker.breaker_state == "closed" and worker.num_failures == 0


def test_only_failures_in_a_row_open_it() -> None:
    workers = workers_at(Clock())
    worker = ready(workers)
    for status in (500, 502, 200) * 5:
        workers.answered(worker, status)
    assert worker.breaker_state == "closed" and worker.num_failures == 10 and worker.last_error == "answered 502"


def test_a_worker_that_came_up_again_begins_anew() -> None:
    workers = workers_at(Clock())
    worker = opened(workers, 1)
    workers.gone(worker, "refused")
    workers.probe_answered(worker)
    assert worker.breaker_state == "closed"


def test_failures_of_a_removed_worker_open_nothing() -> None:
    workers = workers_at(Clock())
    old = ready(workers, 1)
    assert taken(workers) is old
    new = ready(workers, 1)
    for _ in range(5):
        workers.failed(old, "broke off")
    workers.give_back(old)
    assert new.breaker_state == "closed" and taken(workers) is new
