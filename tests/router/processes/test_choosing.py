"""Choice of a worker, limits and lines, over two processes."""

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from services.router.processes.registry import SharedWorkers
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import Seen, answer_ok
from tests.router.processes.talker import Talker, in_flight_ends, one_of_each, talkers
from tests.router.waiting import eventually


@dataclass
class Busy:
    """Takes a while for each request, and knows how many it had at once."""

    seconds: float
    now: int = 0
    most: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, seen: Seen) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        await answer_ok(seen)


async def until_waiting(router: Running, number: int) -> None:
    """Wait until so many requests wait, over all processes."""
    workers = router.listening.router.workers
    assert isinstance(workers, SharedWorkers)
    await eventually(lambda: workers.num_waiting_everywhere() == number, f"{number} wait")


async def repeat(talker: Talker, times: int) -> list[int]:
    return [(await talker.generate()).status for _ in range(times)]


async def test_no_worker_ever_has_more_than_its_limit(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(processes=2, max_in_flight=3)
    busy = [Busy(0.002), Busy(0.005)]
    for handler in busy:
        await router.add(await start_worker(handler))
    async with talkers(router, 24) as made:
        statuses = await asyncio.gather(*(repeat(talker, 20) for talker in made))
    assert {status for found in statuses for status in found} == {200}
    assert [handler.most for handler in busy] == [3, 3]  # used to the full, and never more
    await in_flight_ends(router)


async def test_least_in_flight_sees_what_the_other_process_has(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2)
    release = asyncio.Event()

    async def held(seen: Seen) -> None:
        await release.wait()
        await answer_ok(seen)

    workers = [await start_worker(held) for _ in range(4)]
    for worker in workers:
        await router.add(worker)
    async with one_of_each(router) as (one, other), talkers(router, 6) as more:
        for number, talker in enumerate([one, other, *more]):
            await talker.send("POST", "/generate", b"{}")
            await eventually(
                lambda sent=number + 1: sum(len(w.requests) for w in workers) == sent,  # type: ignore[misc]
                "the request arrived",
            )
        assert [len(worker.requests) for worker in workers] == [2, 2, 2, 2]
        release.set()
        assert [(await talker.answer()).status for talker in [one, other, *more]] == [200] * 8


async def test_round_robin_goes_on_where_the_other_process_left_off(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2, policy="round-robin")
    workers = [await start_worker() for _ in range(3)]
    for worker in workers:
        await router.add(worker)
    async with one_of_each(router) as (one, other):
        for talker in (one, other, other, one, one, other):
            await talker.generate()
    assert [len(worker.requests) for worker in workers] == [2, 2, 2]


async def test_a_session_has_the_same_worker_in_every_process(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2, policy="session")
    workers = [await start_worker() for _ in range(4)]
    for worker in workers:
        await router.add(worker)
    async with one_of_each(router) as both:
        for session in range(20):
            for talker in both:
                await talker.generate(headers=f"x-session-id: s{session}\r\n")
    of_session = {
        session: {
            n for n, worker in enumerate(workers) for s in worker.requests if s.header(b"x-session-id") == [session]
        }
        for session in (b"s%d" % number for number in range(20))
    }
    assert all(len(found) == 1 for found in of_session.values())
    assert len(set.union(*of_session.values())) > 1


async def test_a_freed_place_serves_who_waits_in_the_other_process_at_once(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2, max_in_flight=1)
    release = asyncio.Event()

    async def held(seen: Seen) -> None:
        if seen.header(b"x-hold"):
            await release.wait()
        await answer_ok(seen)

    worker = await start_worker(held)
    await router.add(worker)
    waits: list[float] = []
    async with one_of_each(router) as both:
        for turn in range(10):
            holds, waits_for_it = both if turn % 2 else both[::-1]
            release.clear()
            await holds.send("POST", "/generate", b"{}", headers="x-hold: 1\r\n")
            await worker.arrived(2 * turn + 1)
            await waits_for_it.send("POST", "/generate", b"{}")
            await until_waiting(router, 1)
            released = time.monotonic()
            release.set()
            assert (await waits_for_it.answer()).status == 200
            waits.append(time.monotonic() - released)
            await holds.answer()
    assert statistics.median(waits) < 0.015, waits  # a line that only looks now and then would take 25 ms


async def test_who_waits_first_is_served_first_in_whatever_process(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2, max_in_flight=1)
    release = asyncio.Event()

    async def held(seen: Seen) -> None:
        await release.wait()
        await answer_ok(seen)

    worker = await start_worker(held)
    await router.add(worker)
    async with one_of_each(router) as both, talkers(router, 8) as made:
        await both[0].send("POST", "/generate", b"{}")
        await worker.arrived(1)
        for number, talker in enumerate(made):
            await talker.send("POST", "/generate", b"{}", headers=f"x-number: {number}\r\n")
            await until_waiting(router, number + 1)
        assert len({talker.process for talker in made}) == 2
        release.set()
        for talker in made:
            assert (await talker.answer()).status == 200
    assert [int(seen.header(b"x-number")[0]) for seen in worker.requests[1:]] == list(range(8))


async def test_all_processes_together_have_so_many_places_in_line(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2, max_in_flight=1, max_queued=3)
    release = asyncio.Event()

    async def held(seen: Seen) -> None:
        await release.wait()
        await answer_ok(seen)

    worker = await start_worker(held)
    await router.add(worker)
    async with talkers(router, 6) as made:
        await made[0].send("POST", "/generate", b"{}")
        await worker.arrived(1)
        for number, talker in enumerate(made[1:4]):
            await talker.send("POST", "/generate", b"{}")
            await until_waiting(router, number + 1)
        refused = [await talker.generate() for talker in made[4:]]
        assert [(answer.status, answer.json["error"]["type"]) for answer in refused] == [(503, "queue_full")] * 2
        assert {talker.process for talker in made[4:]} == {talker.process for talker in made}
        release.set()
        assert Counter([(await talker.answer()).status for talker in made[:4]]) == {200: 4}


async def test_a_breaker_that_opens_in_one_process_is_open_in_the_other(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2, breaker_failures=2, breaker_pause_s=30.0, policy="round-robin")

    async def fails(seen: Seen) -> None:
        await seen.answer(b"{}", status=b"500 Internal Server Error")

    bad, good = await start_worker(fails), await start_worker()
    for worker in (bad, good):
        await router.add(worker)
    async with one_of_each(router) as (one, other):
        while len(bad.requests) < 2:
            await one.generate()
        assert [(await other.generate()).status for _ in range(6)] == [200] * 6
    assert len(bad.requests) == 2
