"""The shared numbers by themselves: two sides of one memory, as two processes see it."""

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from services.router.processes.counts import PrimaryCounts, SharedCounts, num_slots
from services.router.processes.memory import SharedMemory
from services.router.workers.breaker import Breaker, BreakerState
from services.router.workers.registration import Registration
from services.router.workers.urls import parse_worker_url
from services.router.workers.worker import Worker
from tests.router.conftest import QUICK

SETTINGS = replace(QUICK, processes=2, max_workers=2, breaker_failures=2, breaker_pause_s=1.0)


def a_worker(port: int = 1) -> Worker:
    breaker = Breaker(failures_to_open=1, pause_s=1.0)
    url = parse_worker_url(f"http://127.0.0.1:{port}")
    return Worker(
        worker_id=f"w{port}",
        url=url,
        registration=Registration(),
        self_admitting=True,
        admitted=True,
        was_admitted=True,
        breaker=breaker,
    )


@dataclass
class Sides:
    """The same worker as both processes have it."""

    memory: SharedMemory
    primary: PrimaryCounts
    secondary: SharedCounts
    wakers: tuple[int, int]
    heard: set[str]
    """Ids of the workers whose leaving the secondary has taken in."""

    def join(self, port: int = 1) -> tuple[Worker, Worker]:
        here, there = a_worker(port), a_worker(port)
        assert self.primary.joined(here)
        there.slot = here.slot
        self.secondary.joined(there)
        return here, there


@pytest.fixture
def sides() -> Iterator[Sides]:
    memory = SharedMemory.create(num_processes=2, num_slots=num_slots(SETTINGS))
    wakers = (os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK))
    heard: set[str] = set()
    primary = PrimaryCounts(memory, SETTINGS, wakers=wakers, taken_in=lambda worker: worker.worker_id in heard)
    yield Sides(memory, primary, SharedCounts(memory, SETTINGS, column=1, wakers=wakers), wakers, heard)
    for fd in (memory.fd, *wakers):
        os.close(fd)


def test_both_see_the_sum(sides: Sides) -> None:
    here, there = sides.join()
    for counts, worker, times in ((sides.primary, here, 3), (sides.secondary, there, 2)):
        for _ in range(times):
            assert counts.take(worker, sys.maxsize)
    sides.primary.refresh([here])
    sides.secondary.refresh([there])
    assert here.in_flight == there.in_flight == 5
    sides.secondary.give_back(there)
    sides.primary.refresh([here])
    assert here.in_flight == 4


def test_the_limit_holds_over_both(sides: Sides) -> None:
    here, there = sides.join()
    assert sides.primary.take(here, 2) and sides.secondary.take(there, 2)
    assert not sides.primary.take(here, 2) and not sides.secondary.take(there, 2)
    sides.primary.give_back(here)
    assert sides.secondary.take(there, 2)


def test_giving_back_more_than_was_taken_here_is_a_bug(sides: Sides) -> None:
    here, there = sides.join()
    sides.primary.take(here, sys.maxsize)
    with pytest.raises(AssertionError, match="more often"):
        sides.secondary.give_back(there)


def test_a_freed_place_wakes_who_waits_and_nobody_else(sides: Sides) -> None:
    here, _ = sides.join()
    sides.primary.take(here, 1)
    sides.primary.give_back(here)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(sides.wakers[1])
    sides.memory.set_waiting(1, 1, 5)
    sides.primary.take(here, 1)
    sides.primary.give_back(here)
    assert os.eventfd_read(sides.wakers[1]) == 1


def test_turns_are_one_sequence(sides: Sides) -> None:
    (one, one_there), (other, other_there) = sides.join(1), sides.join(2)
    sides.primary.take(one, sys.maxsize)
    sides.secondary.take(other_there, sys.maxsize)
    sides.primary.refresh([one, other])
    assert 0 < one.last_turn < other.last_turn
    sides.primary.take(one, sys.maxsize)
    sides.secondary.refresh([one_there, other_there])
    assert one_there.last_turn > other_there.last_turn


def test_a_slot_is_used_again_only_when_all_columns_are_zero(sides: Sides) -> None:
    here, there = sides.join()
    sides.secondary.take(there, sys.maxsize)
    assert not sides.primary.is_over(here)
    sides.secondary.give_back(there)
    assert not sides.primary.is_over(here)  # the secondary may take it still: it has not heard
    sides.heard.add(here.worker_id)
    assert sides.primary.is_over(here)
    sides.primary.forgotten(here)
    assert sides.join(2)[0].slot == here.slot


def test_there_is_no_place_when_all_slots_are_leaving(sides: Sides) -> None:
    joined = [sides.primary.joined(a_worker(port)) for port in range(1, num_slots(SETTINGS) + 2)]
    assert all(joined[:-1]) and not joined[-1]


def test_the_column_of_a_dead_process_is_taken_back_and_its_totals_stay(sides: Sides) -> None:
    here, there = sides.join()
    sides.primary.take(here, sys.maxsize)
    for _ in range(4):
        sides.secondary.take(there, sys.maxsize)
    sides.secondary.requests[there.slot] += 1
    sides.secondary.failures[there.slot] += 1
    sides.memory.set_waiting(1, 3, 9)
    sides.memory.add_closed(1)
    assert sides.memory.take_back(1, heir=0) == 4
    sides.primary.refresh([here])
    sides.primary.total([here])
    assert (here.in_flight, here.num_requests, here.num_failures) == (1, 1, 1)
    assert sides.memory.waiting(1) == sides.memory.waiting_since(1) == sides.memory.closed(1) == 0


def test_a_breaker_opens_for_both_and_one_of_them_tries(sides: Sides) -> None:
    here, there = sides.join()
    here.breaker.failed(10.0)
    there.breaker.failed(10.0)
    assert here.breaker.is_open and there.breaker.state is BreakerState.OPEN
    assert not here.breaker.may_try(10.5) and here.breaker.may_try(11.0) and there.breaker.may_try(11.0)
    there.breaker.begin_trial(0)
    assert not here.breaker.may_try(11.0) and here.breaker.state is BreakerState.HALF_OPEN
    here.breaker.ended(0, 11.0)  # not the one that tries
    assert not here.breaker.may_try(20.0)
    there.breaker.succeeded()
    assert here.breaker.state is BreakerState.CLOSED and here.breaker.failures_in_a_row == 0


def test_a_trial_of_a_dead_process_is_over(sides: Sides) -> None:
    here, there = sides.join()
    for _ in range(2):
        there.breaker.failed(10.0)
    there.breaker.begin_trial(0)
    assert not here.breaker.may_try(20.0)
    sides.memory.take_back(1, heir=0)
    assert here.breaker.may_try(20.0)


def test_one_count_in_shared_memory_is_as_one_count(sides: Sides) -> None:
    chance = random.Random(7)
    pairs = [sides.join(port) for port in range(1, 5)]
    held: list[tuple[SharedCounts, Worker, int]] = []
    truth = [0] * len(pairs)
    for _ in range(2000):
        if held and chance.random() < 0.5:
            counts, worker, index = held.pop(chance.randrange(len(held)))
            counts.give_back(worker)
            truth[index] -= 1
        else:
            index = chance.randrange(len(pairs))
            counts, worker = chance.choice([(sides.primary, pairs[index][0]), (sides.secondary, pairs[index][1])])
            assert counts.take(worker, 5) == (truth[index] < 5)
            if truth[index] < 5:
                held.append((counts, worker, index))
                truth[index] += 1
        sides.primary.refresh([here for here, _ in pairs])
        assert [here.in_flight for here, _ in pairs] == truth


HOLDER = textwrap.dedent("""
    import sys
    from services.router.processes.memory import SharedMemory
    memory = SharedMemory(int(sys.argv[1]), num_processes=2, num_slots=int(sys.argv[2]))
    memory.lock(0)
    print("locked", flush=True)
    sys.stdin.read()
""")


def test_the_lock_of_a_killed_process_is_free(sides: Sides) -> None:
    here, _ = sides.join()
    command = [sys.executable, "-c", HOLDER, str(sides.memory.fd), str(num_slots(SETTINGS))]
    with subprocess.Popen(command, pass_fds=[sides.memory.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        holder.kill()
        holder.wait(10)
        assert sides.primary.take(here, 1)
