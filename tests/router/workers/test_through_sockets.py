"""Choice, queue and membership as clients see them."""

import asyncio

import orjson
import pytest

from services.router.workers.worker import State
from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import Seen
from tests.router.raw_client import exchange, post
from tests.router.waiting import eventually


async def test_one_of_several_workers_of_the_flags_may_be_down(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    good, late = await start_worker(), await start_worker()
    await late.die()
    router = await start_router(worker_urls=(good.url, late.url + "/"))
    await router.until_state(good.url, State.READY)
    assert (await exchange(router.port, post(b"/generate"))).status == 200
    await late.start()
    await router.until_state(late.url, State.READY)


async def test_at_the_limit_requests_wait_their_turn_and_all_are_answered(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    at_once = most = 0

    async def slow(seen: Seen) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        await seen.answer()

    router = await start_router(max_in_flight=2)
    worker = await start_worker(slow)
    await router.add(worker)
    answers = await asyncio.gather(*(exchange(router.port, post(b"/generate")) for _ in range(40)))
    assert [answer.status for answer in answers] == [200] * 40
    assert most == 2 and len(worker.requests) == 40
    assert [w.in_flight for w in router.listening.router.workers.all()] == [0]


async def test_beyond_the_line_requests_are_refused_with_a_time_to_come_back(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    go = asyncio.Event()

    async def held(seen: Seen) -> None:
        await go.wait()
        await seen.answer()

    router = await start_router(max_in_flight=1, max_queued=1)
    await router.add(await start_worker(held))
    first = asyncio.create_task(exchange(router.port, post(b"/generate")))
    workers = router.listening.router.workers
    await eventually(lambda: workers.all()[0].in_flight == 1, "the first is with the worker")
    second = asyncio.create_task(exchange(router.port, post(b"/generate")))
    await eventually(lambda: workers.num_waiting() == 1, "the second waits")
    third = await exchange(router.port, post(b"/generate"))
    assert third.status == 503 and b"queue_full" in third.body and third.header(b"retry-after")
    go.set()
    assert [(await first).status, (await second).status] == [200, 200]


async def test_a_session_stays_with_its_worker_and_moves_when_that_one_dies(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(policy="session")
    workers = [await start_worker() for _ in range(3)]
    for worker in workers:
        await router.add(worker)
    request = post(b"/generate", extra=b"x-session-id: a conversation\r\n")
    for _ in range(6):
        assert (await exchange(router.port, request)).status == 200
    [home] = [worker for worker in workers if worker.requests]
    assert len(home.requests) == 6
    await home.die()
    for _ in range(4):
        assert (await exchange(router.port, request)).status == 200
    [heir] = [worker for worker in workers if worker.requests and worker is not home]
    assert len(heir.requests) == 4


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_router_registered_with_itself_never_gets_its_own_requests(
    start_router: StartRouter, start_worker: StartWorker, processes: int
) -> None:
    router = await start_router(processes=processes)
    async with router.http.post(f"{router.url}/workers", json={"url": router.url}) as answer:
        assert answer.status == 202
    await router.add(await start_worker())
    (itself,) = [w for w in router.listening.router.workers.all() if str(w.url) == router.url]
    await eventually(lambda: "this is the router itself" in itself.last_error, "it is recognised")
    assert itself.state is State.JOINING
    async with router.http.post(f"{router.url}/flush_cache") as answer:
        assert "circle" in str((await answer.json())["failed"])


@pytest.mark.parametrize(
    "settings",
    [{"policy": "session", "session_key": "body:user"}, {"policy": "prefix", "prefix_chars": 8}],
    ids=["session", "prefix"],
)
async def test_what_a_body_says_finds_its_worker_again(
    start_router: StartRouter, start_worker: StartWorker, settings: dict[str, object]
) -> None:
    router = await start_router(**settings)
    workers = [await start_worker() for _ in range(3)]
    for worker in workers:
        await router.add(worker)
    for turn in range(3):
        for user in range(13):  # which the turns of three workers do not divide
            body = orjson.dumps({"user": f"{user}", "prompt": f"prompt{user:02}, turn {turn}"})
            assert (await exchange(router.port, post(b"/v1/completions", body))).status == 200
    had = [{orjson.loads(seen.body)["user"] for seen in worker.requests} for worker in workers]
    assert sum(map(len, had)) == len(set().union(*had)) == 13 and max(map(len, had)) < 13
