"""Priorities, labels and limits around the policies."""

from dataclasses import replace

import pytest

from services.router.workers.counts import Counts
from services.router.workers.want import Want
from services.router.workers.worker import Worker
from services.router.workers.workers import Workers
from tests.router.workers.clock import SETTINGS, Clock, labelled, ready, workers_at

POLICIES = ["least-in-flight", "round-robin", "power-of-two", "session", "prefix"]


def wants(number: int) -> list[Want]:
    return [Want(session=b"s%d" % n, prefix=b"p%d" % n) for n in range(number)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lower_priority_serves_only_what_the_higher_cannot_take(policy: str) -> None:
    workers = workers_at(Clock(), policy=policy, max_in_flight=2)
    low = ready(workers, 1, priority=10)
    high = [ready(workers, 2, priority=50), ready(workers, 3, priority=50)]
    taken = [workers.take(want) for want in wants(6)]
    assert set(taken[:4]) == set(high) and taken[4:] == [low, low]
    assert workers.take() is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_labelled_request_goes_only_where_all_its_labels_are(policy: str) -> None:
    workers = workers_at(Clock(), policy=policy)
    both = ready(workers, 1, labels={"pool": "eval", "zone": "a"})
    ready(workers, 2, labels={"pool": "eval"})
    ready(workers, 3)
    want = Want(session=b"x", prefix=b"y", labels=frozenset({("pool", "eval"), ("zone", "a")}))
    assert {workers.take(want) for _ in range(9)} == {both}


def test_labels_follow_a_worker_that_is_registered_again() -> None:
    workers = workers_at(Clock())
    ready(workers, 1, labels={"pool": "eval"})
    assert workers.take(labelled(pool="eval")) is not None
    ready(workers, 1, labels={"pool": "train"})
    assert workers.take(labelled(pool="eval")) is None


def test_made_up_labels_leave_nothing_behind() -> None:
    workers = workers_at(Clock())
    ready(workers, 1)
    for number in range(5000):
        assert workers.take(labelled(pool=str(number))) is None
    assert len(workers._selection._labelled) == 0


def test_no_limit_is_passed_whatever_is_wanted() -> None:
    workers = workers_at(Clock(), policy="session", max_in_flight=3)
    everyone = [ready(workers, port) for port in (1, 2)]
    taken = [workers.take(Want(session=b"hot")) for _ in range(10)]
    assert taken.count(None) == 4 and [w.in_flight for w in everyone] == [3, 3]


def test_a_place_that_another_process_took_just_now_is_not_given_twice() -> None:
    class Shared(Counts):
        """Another process takes the first worker's place between the look and the taking."""

        def take(self, worker: Worker, limit: int) -> bool:
            if worker.in_flight == 0 and worker.url.port == 1:
                worker.in_flight = 1
                return False
            return worker.in_flight < limit and super().take(worker, limit)

    clock = Clock()
    workers = Workers(replace(SETTINGS, max_in_flight=1), counts=Shared(), clock=clock, call_later=clock.call_later)
    _, other = ready(workers, 1), ready(workers, 2)
    assert workers.take() is other and workers.take() is None
