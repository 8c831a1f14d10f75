"""Waiting in line for a worker: order, bounds, limits, and exactly one answer each."""

import asyncio
import time

import pytest

from services.router.workers.queue import NoReadyWorker, NoSuchWorker, QueueFull, Stopping
from services.router.workers.want import ANY, Want
from services.router.workers.workers import Refused, Worker, Workers
from tests.router.workers.clock import SETTINGS, Clock, Waiting, labelled, ready, wait, workers_at


def test_who_frees_a_worker_hands_it_to_the_first_in_line_at_once() -> None:
    workers = workers_at(Clock(), max_in_flight=1)
    worker = ready(workers)
    assert workers.take() is worker
    first, second = wait(workers), wait(workers)
    workers.give_back(worker)
    assert (first.got, second.got, worker.in_flight, workers.num_waiting()) == ([worker], [], 1, 1)


def test_a_worker_that_becomes_ready_serves_the_line_up_to_its_limit() -> None:
    workers = workers_at(Clock(), max_in_flight=2)
    line = [wait(workers) for _ in range(3)]
    worker = ready(workers)
    assert [len(each.got) for each in line] == [1, 1, 0] and worker.in_flight == 2


def test_nobody_overtakes_the_line() -> None:
    workers = workers_at(Clock(), max_in_flight=1)
    worker = ready(workers)
    workers.take()
    waiting = wait(workers)
    assert workers.take() is None
    workers.give_back(worker)
    assert waiting.got == [worker] and workers.take() is None


def test_a_wish_that_cannot_be_met_holds_nobody_up() -> None:
    workers = workers_at(Clock(), max_in_flight=1)
    plain, special = ready(workers, 1), ready(workers, 2, labels={"pool": "eval"})
    assert {workers.take(), workers.take()} == {plain, special}
    first, second = wait(workers, labelled(pool="eval")), wait(workers)
    workers.give_back(plain)
    assert (first.got, second.got) == ([], [plain])
    workers.give_back(special)
    assert first.got == [special]


def test_the_first_of_several_lines_is_served_first() -> None:
    workers = workers_at(Clock(), max_in_flight=1)
    worker = ready(workers, labels={"pool": "eval", "zone": "a"})
    workers.take()
    line = [wait(workers, want) for want in (labelled(zone="a"), ANY, labelled(pool="eval"), labelled(zone="a"))]
    order = []
    for _ in line:
        workers.give_back(worker)
        order.append(next(index for index, each in enumerate(line) if each.got and index not in order))
    assert order == [0, 1, 2, 3]


def test_affinity_never_waits_for_its_own_worker_while_another_is_free() -> None:
    workers = workers_at(Clock(), max_in_flight=1, policy="session")
    for port in range(1, 5):
        ready(workers, port)
    taken = [workers.take(Want(session=b"hot")) for _ in range(4)]
    assert len(set(taken)) == 4 and None not in taken


def test_who_was_tried_is_not_handed_over_again() -> None:
    workers = workers_at(Clock(), max_in_flight=1)
    tried, other = ready(workers, 1), ready(workers, 2)
    assert {workers.take(), workers.take()} == {tried, other}
    waiting = wait(workers, but_not=(tried,))
    workers.give_back(tried)
    assert waiting.got == []
    workers.give_back(other)
    assert waiting.got == [other]


def test_the_line_is_bounded() -> None:
    workers = workers_at(Clock(), max_queued=2)
    wait(workers), wait(workers)
    with pytest.raises(QueueFull, match="2 requests wait already, the limit --router-max-queued") as caught:
        wait(workers)
    assert caught.value.kind == "queue_full" and workers.num_waiting() == 2


def test_time_runs_out_for_each_at_its_own_moment_and_says_why() -> None:
    clock = Clock()
    workers = workers_at(clock)
    workers.gone(workers.add("http://127.0.0.1:30000", admit=True), "refused the connection")
    long, short = wait(workers), wait(workers, deadline=clock.now + 1)
    clock.go_on(1.1)
    assert (long.num_callbacks, short.num_callbacks) == (0, 1)
    clock.go_on(4)
    assert "30000 is UNREADY (refused the connection)" in str(long.refused[0])
    assert isinstance(long.refused[0], NoReadyWorker) and workers.num_waiting() == 0 and clock.num_timers == 0


async def test_time_runs_out_on_a_real_loop_too() -> None:
    workers = Workers(SETTINGS)
    over: asyncio.Future[Refused] = asyncio.get_running_loop().create_future()
    began = time.monotonic()
    workers.queue(ANY, lambda _: None, over.set_result, deadline=began + 0.12)
    async with asyncio.timeout(5):
        assert "none is registered" in str(await over)
    assert time.monotonic() - began >= 0.12


def test_one_timer_serves_the_whole_line_and_none_an_empty_one() -> None:
    clock = Clock()
    workers = workers_at(clock)
    line = [wait(workers) for _ in range(50)]
    assert clock.num_timers == 1
    for each in line:
        assert each.ticket is not None
        each.ticket.cancel()
    assert clock.num_timers == 0 and workers.num_waiting() == 0


def test_a_deadline_that_is_over_refuses_at_once() -> None:
    clock = Clock()
    with pytest.raises(NoReadyWorker, match="none is registered"):
        wait(workers_at(clock), deadline=clock.now)


def test_a_cancelled_place_is_passed_over() -> None:
    workers = workers_at(Clock(), max_in_flight=1)
    worker = ready(workers)
    workers.take()
    left, next_in_line = wait(workers), wait(workers)
    assert left.ticket is not None
    left.ticket.cancel()
    left.ticket.cancel()
    workers.give_back(worker)
    assert (left.num_callbacks, next_in_line.got) == (0, [worker])


def test_cancelling_after_the_answer_does_nothing() -> None:
    workers = workers_at(Clock())
    waiting = wait(workers)
    worker = ready(workers)
    assert waiting.ticket is not None and not waiting.ticket.waiting
    waiting.ticket.cancel()
    assert waiting.got == [worker] and worker.in_flight == 1


def test_labels_that_no_worker_has_are_refused_at_once_by_name() -> None:
    workers = workers_at(Clock())
    ready(workers, labels={"pool": "train"})
    with pytest.raises(NoSuchWorker, match="pool=eval,zone=a"):
        wait(workers, labelled(zone="a", pool="eval"))


def test_labels_of_a_worker_that_is_down_are_waited_for() -> None:
    workers = workers_at(Clock())
    worker = ready(workers, labels={"pool": "eval"})
    workers.gone(worker, "refused")
    waiting = wait(workers, labelled(pool="eval"))
    workers.probe_answered(worker)
    assert waiting.got == [worker]


def test_closing_tells_all_that_wait_and_refuses_who_comes() -> None:
    workers = workers_at(Clock())
    line = [wait(workers), wait(workers, Want(session=b"x"))]
    workers.close()
    assert [type(each.refused[0]) for each in line] == [Stopping, Stopping]
    with pytest.raises(Stopping, match="stopping"):
        wait(workers)
    assert workers.take() is None and workers.num_waiting() == 0


def test_a_router_that_stops_has_no_worker_ready() -> None:
    workers = workers_at(Clock())
    ready(workers)
    assert workers.num_ready() == 1
    workers.close()
    assert workers.num_ready() == 0  # /readyz on a connection that is still open


def test_five_thousand_that_fail_at_once_do_not_stand_on_each_other() -> None:
    workers = workers_at(Clock(), max_in_flight=1, max_queued=6000)
    worker = ready(workers)
    workers.take()
    served = []

    def fail_at_once(given: Worker) -> None:
        served.append(given)
        workers.give_back(given)

    for _ in range(5000):
        workers.queue(ANY, fail_at_once, lambda _: None)
    workers.give_back(worker)
    assert len(served) == 5000 and worker.in_flight == 0


def test_a_callback_that_queues_again_goes_to_the_end() -> None:
    workers = workers_at(Clock(), max_in_flight=1)
    worker = ready(workers)
    workers.take()
    order: list[str] = []

    def again(given: Worker) -> None:
        order.append("first")
        workers.queue(ANY, lambda _: order.append("again"), lambda _: None)
        workers.give_back(given)

    workers.queue(ANY, again, lambda _: None)
    second = wait(workers)
    workers.give_back(worker)
    workers.give_back(worker)
    assert order == ["first", "again"] and second.got == [worker]


def test_a_callback_that_breaks_costs_nobody_else_his_turn() -> None:
    clock = Clock()
    workers = workers_at(clock)

    def broken(_: Worker | Refused) -> None:
        raise RuntimeError("a bug")

    workers.queue(ANY, broken, broken)
    behind = wait(workers)
    clock.go_on(6)
    assert len(behind.refused) == 1 and workers.num_waiting() == 0


def test_a_worker_that_is_back_from_its_breaker_serves_the_line() -> None:
    clock = Clock()
    workers = workers_at(clock, max_in_flight=1)
    well, bad = ready(workers, 1), ready(workers, 2)
    for _ in range(3):
        workers.failed(bad, "answered 500")
    assert workers.take() is well and workers.take() is None
    waiting: Waiting = wait(workers)
    clock.go_on(1.9)
    assert waiting.got == []
    clock.go_on(0.2)
    assert waiting.got == [bad]


def test_who_waits_for_the_last_that_was_well_is_served_when_that_one_fails_too() -> None:
    workers = workers_at(Clock(), max_in_flight=2)
    well, bad = ready(workers, 1), ready(workers, 2)
    for _ in range(3):
        workers.failed(bad, "answered 500")
    assert [workers.take(), workers.take()] == [well, well]
    line = [wait(workers), wait(workers)]
    for _ in range(3):
        workers.failed(well, "answered 500")
    assert [each.got for each in line] == [[bad], [bad]]
