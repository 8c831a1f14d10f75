"""The life of a worker, without sockets."""

from dataclasses import replace
from typing import Any

import pytest

from furlong.config import RunConfig
from services.router.settings import RouterSettings
from services.router.workers.registration import Registration
from services.router.workers.urls import BadUrl, BadWorker
from services.router.workers.workers import State, TooManyWorkers, Worker, Workers

URL = "http://127.0.0.1:30000"
SETTINGS = replace(
    RouterSettings.of(RunConfig()),
    queue_timeout_s=5.0,
    health_fail_threshold=3,
    health_success_threshold=2,
    max_workers=3,
    max_queued=2,
)


def state_of(worker: Worker) -> State:
    """A fresh look, which a type checker does not take for the last one."""
    return worker.state


def ready_worker(workers: Workers, url: str = URL, *, admit: bool = True) -> Worker:
    worker = workers.add(url, admit=admit)
    workers.probe_answered(worker)
    workers.probe_answered(worker)
    return worker


def test_ready_needs_a_probe_and_an_admission() -> None:
    workers = Workers(SETTINGS)
    worker = workers.add(URL, admit=False)
    assert state_of(worker) is State.JOINING
    workers.probe_answered(worker)
    workers.probe_answered(worker)
    assert state_of(worker) is State.JOINING and workers.take() is None
    workers.set_state(worker, admit=True, policy_version=7)
    assert state_of(worker) is State.READY and workers.take() is worker


def test_admission_before_the_probe_does_as_well() -> None:
    workers = Workers(SETTINGS)
    worker = workers.add(URL, admit=False)
    workers.set_state(worker, admit=True, policy_version=0)
    assert state_of(worker) is State.JOINING
    workers.probe_answered(worker)
    workers.probe_answered(worker)
    assert state_of(worker) is State.READY


def test_a_worker_that_is_not_admitted_gets_nothing_new() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers)
    workers.set_state(worker, admit=False, policy_version=None)
    assert state_of(worker) is State.UNREADY and workers.take() is None


def test_one_missed_probe_changes_nothing() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers)
    states = set()
    for probe in range(20):
        if probe % 3 == 2:
            workers.probe_failed(worker, "late", timed_out=True)
        else:
            workers.probe_answered(worker)
        states.add(worker.state)
    assert states == {State.READY}


def test_failed_probes_in_a_row_take_it_out_and_good_ones_bring_it_back() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers)
    for _ in range(3):
        assert state_of(worker) is State.READY
        workers.probe_failed(worker, "answered 500")
    assert state_of(worker) is State.UNREADY and worker.last_error == "answered 500"
    workers.probe_answered(worker)
    assert state_of(worker) is State.UNREADY
    workers.probe_answered(worker)
    assert state_of(worker) is State.READY


def test_busy_is_not_dead() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers)
    workers.take()
    for _ in range(10):
        workers.probe_failed(worker, "late", timed_out=True)
    assert state_of(worker) is State.READY
    worker.last_heard -= SETTINGS.health_busy_grace_s  # silent for that long, with a request in flight
    for _ in range(3):
        workers.probe_failed(worker, "late", timed_out=True)
    assert state_of(worker) is State.UNREADY


def test_an_engine_that_is_paused_for_an_update_stays_alive() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers, admit=False)
    workers.set_state(worker, admit=True, policy_version=1)
    workers.set_state(worker, admit=False, policy_version=1)
    for _ in range(5):
        workers.probe_failed(worker, "GET /ready was answered 503", refused=True)
    workers.set_state(worker, admit=True, policy_version=2)
    assert state_of(worker) is State.READY and worker.policy_version == 2


def test_a_process_that_went_away_must_be_confirmed_again() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers, admit=False)
    workers.set_state(worker, admit=True, policy_version=3)
    workers.gone(worker, "refused")
    assert state_of(worker) is State.UNREADY and worker.policy_version is None
    workers.probe_answered(worker)
    workers.probe_answered(worker)
    assert state_of(worker) is State.UNREADY and workers.take() is None


def test_a_worker_of_http_comes_back_by_itself_unless_it_was_paused() -> None:
    workers = Workers(SETTINGS)
    worker, paused = ready_worker(workers), ready_worker(workers, "http://127.0.0.1:30001")
    workers.set_state(paused, admit=False, policy_version=None)
    for each in (worker, paused):
        workers.gone(each, "refused")
        workers.probe_answered(each)
        workers.probe_answered(each)
    assert (worker.state, paused.state) == (State.READY, State.UNREADY)


def test_registering_again_starts_anew_and_old_completions_stay_away() -> None:
    workers = Workers(SETTINGS)
    old = ready_worker(workers)
    assert workers.take() is old
    new = ready_worker(workers, URL + "/")
    assert new is not old and new.worker_id != old.worker_id and workers.all() == [new]
    workers.answered(old, 200)
    workers.give_back(old)
    assert (new.in_flight, new.num_requests, old.in_flight) == (0, 0, 0)


def test_a_removed_worker_drains_and_then_is_forgotten() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers)
    workers.take()
    assert workers.remove(worker.worker_id) and not workers.remove(worker.worker_id)
    assert [w.state for w in workers.all()] == [State.DRAINING] and workers.take() is None
    workers.give_back(worker)
    assert workers.all() == []


def test_limits_and_bad_addresses() -> None:
    workers = Workers(SETTINGS)
    for port in (1, 2, 3):
        workers.add(f"http://127.0.0.1:{port}", admit=True)
    workers.add("http://127.0.0.1:2", admit=True)  # again, not one more
    with pytest.raises(TooManyWorkers, match="--router-max-workers"):
        workers.add("http://127.0.0.1:4", admit=True)
    with pytest.raises(BadUrl):
        workers.add("file:///x", admit=True)


def test_a_worker_that_failed_its_probes_must_be_confirmed_again() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers, admit=False)
    workers.set_state(worker, admit=True, policy_version=3)
    for _ in range(SETTINGS.health_fail_threshold):
        workers.probe_failed(worker, "answered 500")
    workers.probe_answered(worker)
    workers.probe_answered(worker)
    assert state_of(worker) is State.UNREADY and worker.policy_version is None
    workers.set_state(worker, admit=True, policy_version=4)
    assert state_of(worker) is State.READY


def test_an_admission_without_a_version_confirms_nothing() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers, admit=False)
    workers.set_state(worker, admit=True, policy_version=None)
    assert state_of(worker) is State.JOINING and workers.take() is None


def test_registering_over_http_does_not_get_round_the_confirmation() -> None:
    workers = Workers(SETTINGS)
    workers.set_state(ready_worker(workers, admit=False), admit=True, policy_version=3)
    again = ready_worker(workers, admit=True)
    assert state_of(again) is State.JOINING and workers.take() is None
    workers.remove(again.worker_id)
    assert state_of(ready_worker(workers, admit=True)) is State.READY


def test_where_no_version_is_required_none_is_waited_for() -> None:
    workers = Workers(replace(SETTINGS, require_policy_version=False))
    worker = ready_worker(workers, admit=False)
    assert state_of(worker) is State.READY
    workers.set_state(worker, admit=True, policy_version=3)
    workers.gone(worker, "refused")
    workers.probe_answered(worker)
    workers.probe_answered(worker)
    assert state_of(worker) is State.READY


def test_a_draining_worker_is_found_until_it_is_done() -> None:
    workers = Workers(SETTINGS)
    worker = ready_worker(workers)
    workers.take()
    workers.remove(URL)
    assert workers.find(worker.worker_id) is worker and workers.find(URL + "/") is worker
    assert workers.registered(worker.worker_id) is None
    workers.give_back(worker)
    assert workers.find(worker.worker_id) is None


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ({"worker_type": ""}, "worker_type must be"),
        ({"labels": {"pool": 7}}, "labels: 'pool' = 7"),
        ({"labels": {"a,b": "c"}}, "without ',' and '='"),
        ({"labels": [1]}, "labels must be an object"),
        ({"labels": {str(n): "x" for n in range(65)}}, "at most 64"),
        ({"priority": True}, "priority must be a whole number"),
        ({"priority": 1.5}, "priority must be a whole number"),
        ({"api_key": "se cret\r\nx: y"}, "api_key must be"),
    ],
)
def test_what_cannot_be_said_of_a_worker_is_refused(said: dict[str, Any], rule: str) -> None:
    with pytest.raises(BadWorker, match=rule) as caught:
        Registration(**said)
    assert "cret" not in str(caught.value)


def test_the_key_is_never_shown() -> None:
    worker = Workers(SETTINGS).add(URL, admit=True, registration=Registration(api_key="hunter2"))
    assert worker.api_key == "hunter2" and "hunter2" not in repr(worker) + repr(worker.record())


async def test_watchers_hear_now_and_after_each_change() -> None:
    workers = Workers(SETTINGS)
    changes = workers.changes()
    await anext(changes)
    worker = workers.add(URL, admit=True)
    await anext(changes)
    assert workers.all() == [worker]
    workers.remove(worker.worker_id)
    await anext(changes)
    assert workers.all() == []


def test_a_worker_that_fails_at_once_does_not_draw_the_load() -> None:
    workers = Workers(SETTINGS)
    bad, good = ready_worker(workers), ready_worker(workers, "http://127.0.0.1:30001")
    taken = []
    for _ in range(100):
        worker = workers.take()
        assert worker is not None
        taken.append(worker)
        workers.answered(worker, 500 if worker is bad else 200)
        workers.give_back(worker)
    assert taken.count(bad) == SETTINGS.breaker_failures and taken.count(good) == 95
