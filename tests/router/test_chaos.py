"""Many requests, workers killed among them: each is answered once, no POST runs twice, counters end at zero."""

import asyncio
from collections import Counter

import aiohttp

from tests.router.conftest import Running, StartWorker
from tests.router.fake_worker import FakeWorker, Seen
from tests.router.waiting import eventually

NUM_REQUESTS = 200
BODY = b"x" * 5000


async def slow_answer(seen: Seen) -> None:
    """Streams if asked to, else answers whole; either takes a while."""
    if b"stream" not in seen.body:
        await asyncio.sleep(0.05)
        await seen.answer(BODY)
        return
    await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for start in range(0, len(BODY), 1000):
        await seen.send(b"3e8\r\n%s\r\n" % BODY[start : start + 1000])
        await asyncio.sleep(0.01)
    await seen.send(b"0\r\n\r\n")


async def ask(router: Running, number: int) -> str:
    """One request; how it ended."""
    asked = {"id": f"<{number}>", "mode": "stream" if number % 2 else "whole"}
    try:
        async with router.http.post(f"{router.url}/generate", json=asked) as answer:
            body = await answer.read()
    except aiohttp.ClientPayloadError:
        return "cut"
    if answer.status == 200:
        assert body == BODY
        return "whole"
    assert answer.status == 502 and b"worker_broken" in body
    return "refused"


async def test_every_request_is_answered_once_while_workers_are_killed(
    router: Running, start_worker: StartWorker
) -> None:
    workers: list[FakeWorker] = [await start_worker(slow_answer) for _ in range(4)]
    for worker in workers:
        await router.add(worker)
    asked = []
    for number in range(NUM_REQUESTS):
        asked.append(asyncio.create_task(ask(router, number)))
        await asyncio.sleep(0.001)
        if number in (50, 100, 150):
            await workers[number // 50 - 1].die()
        if number == 120:
            await workers[0].start()
    ends = Counter(await asyncio.gather(*asked))
    assert ends.total() == NUM_REQUESTS and ends["whole"] > NUM_REQUESTS / 2 and ends["refused"] + ends["cut"] > 0
    runs = Counter(seen.body for worker in workers for seen in worker.requests)
    assert max(runs.values()) == 1 and len(runs) <= NUM_REQUESTS
    assert len(runs) >= ends["whole"] + ends["cut"]
    known = router.listening.router.workers
    await eventually(lambda: [w.in_flight for w in known.all()] == [0] * 4, "all counters are zero")
    assert known.num_waiting() == 0


async def test_a_crowd_without_trouble_is_spread_evenly_and_loses_nothing(
    router: Running, start_worker: StartWorker
) -> None:
    workers: list[FakeWorker] = [await start_worker(slow_answer) for _ in range(4)]
    for worker in workers:
        await router.add(worker)
    ends = Counter(await asyncio.gather(*(ask(router, number) for number in range(NUM_REQUESTS))))
    assert ends == {"whole": NUM_REQUESTS}
    assert all(abs(len(worker.requests) - NUM_REQUESTS / 4) <= 5 for worker in workers)
