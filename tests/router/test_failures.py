"""Workers that die, hang, cut and refuse: what the client sees, and how often a worker was asked."""

import asyncio
import time

import aiohttp
import pytest

from services.router.workers.workers import State
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import FakeWorker, Seen, answer_ok
from tests.router.raw_client import exchange, get, post
from tests.router.test_keep_alive import trust
from tests.router.waiting import eventually


async def close_without_answer(seen: Seen) -> None:
    seen.writer.close()


async def hang(seen: Seen) -> None:
    await asyncio.Event().wait()


async def test_a_post_is_never_run_twice(router: Running, start_worker: StartWorker) -> None:
    workers = [await start_worker(close_without_answer) for _ in range(2)]
    for worker in workers:
        await router.add(worker)
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == 502 and b"worker_broken" in answer.body
    assert sum(len(worker.requests) for worker in workers) == 1
    assert any(worker.url.encode() in answer.body for worker in workers)


async def test_a_post_is_never_run_twice_on_a_kept_connection(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    trust(router)
    await exchange(router.port, post(b"/generate"))
    worker.handler = close_without_answer
    assert (await exchange(router.port, post(b"/generate"))).status == 502
    assert len(worker.requests) == 2 and len({id(seen.writer) for seen in worker.requests}) == 1


async def test_a_get_without_an_answer_goes_to_another_worker(router: Running, start_worker: StartWorker) -> None:
    bad, good = await start_worker(close_without_answer), await start_worker()
    await router.add(bad)
    await router.add(good)
    answers = [await exchange(router.port, get(b"/model_info")) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200] and len(bad.requests) >= 1


async def test_a_second_try_goes_to_another_worker_whoever_the_policy_would_choose(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(policy="session", breaker_failures=1000)
    bad, good = await start_worker(close_without_answer), await start_worker()
    await router.add(bad)
    await router.add(good)
    sessions = [get(b"/model_info", extra=b"x-session-id: %d\r\n" % number) for number in range(30)]
    answers = [await exchange(router.port, session) for session in sessions]
    assert [answer.status for answer in answers] == [200] * 30
    assert 0 < len(bad.requests) < 30 and len(good.requests) == 30  # each at most once at the bad one


async def test_a_refused_connection_is_tried_elsewhere_at_once(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(health_interval_s=60.0)
    dead, good = await start_worker(), await start_worker()
    dead_id = await router.add(dead)
    await router.add(good)
    await dead.die()
    answers = [await exchange(router.port, post(b"/generate")) for _ in range(10)]
    assert [answer.status for answer in answers] == [200] * 10 and len(good.requests) == 10
    assert router.listening.router.workers.find(dead_id).state is State.UNREADY  # type: ignore[union-attr]


async def test_one_dead_worker_of_two_does_not_stop_the_start(router: Running, start_worker: StartWorker) -> None:
    dead, good = await start_worker(), await start_worker()
    await dead.die()
    await router.add(dead, until_ready=False)
    await router.add(good)
    assert (await exchange(router.port, post(b"/generate"))).status == 200
    await dead.start()
    await router.until_state(dead.url, State.READY)


async def test_without_a_worker_a_request_waits_and_is_then_told(start_router: StartRouter) -> None:
    router = await start_router(queue_timeout_s=0.2)
    started = time.monotonic()
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == 503 and b"none is registered" in answer.body and answer.header(b"retry-after") == [b"1"]
    assert 0.2 <= time.monotonic() - started < 2


async def test_nobody_waits_for_workers_that_nobody_brings(start_router: StartRouter) -> None:
    router = await start_router(require_policy_version=False, queue_timeout_s=60.0)
    async with asyncio.timeout(2.0):
        answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == 503 and b"no worker is registered: POST /workers" in answer.body
    assert answer.header(b"retry-after") == [b"1"]


async def test_a_waiting_request_is_served_by_the_worker_that_comes(router: Running, start_worker: StartWorker) -> None:
    waiting = asyncio.create_task(exchange(router.port, post(b"/generate")))
    workers = router.listening.router.workers
    await eventually(lambda: workers.num_waiting() == 1, "the request waits")
    await router.add(await start_worker())
    assert (await waiting).status == 200 and workers.num_waiting() == 0


async def test_a_full_queue_is_503_at_once(start_router: StartRouter) -> None:
    router = await start_router(max_queued=1, queue_timeout_s=1.0)
    first = asyncio.create_task(exchange(router.port, post(b"/generate")))
    await eventually(lambda: router.listening.router.workers.num_waiting() == 1, "the request waits")
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == 503 and b"queue_full" in answer.body
    assert (await first).status == 503


async def test_a_worker_that_never_answers_holds_up_only_its_own(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(first_byte_timeout_s=0.5)
    hung, good = await start_worker(hang), await start_worker()
    await router.add(hung)
    await router.add(good)
    answers = await asyncio.gather(*(exchange(router.port, post(b"/generate")) for _ in range(50)))
    statuses = [answer.status for answer in answers]
    assert statuses.count(504) == len(hung.requests) and statuses.count(200) == len(good.requests)
    assert len(hung.requests) + len(good.requests) == 50
    late = next(answer for answer in answers if answer.status == 504)
    assert b"worker_late" in late.body and hung.url.encode() in late.body


async def test_a_worker_that_takes_no_connection(start_router: StartRouter, start_worker: StartWorker) -> None:
    """A full listen queue answers no SYN: the connection neither opens nor fails."""
    import socket

    router = await start_router(connect_timeout_s=0.3, health_interval_s=60.0)
    worker = await start_worker()
    await router.add(worker)
    await worker.die()
    full = socket.create_server((worker.host, worker.port), backlog=0)
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex((worker.host, worker.port))
        fillers.append(filler)
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == 504 and b"worker_unreachable" in answer.body and worker.url.encode() in answer.body
    assert router.listening.router.workers.find(worker.url).breaker.failures_in_a_row == 1  # type: ignore[union-attr]
    for sock in (full, *fillers):
        sock.close()


@pytest.mark.parametrize("framing", [b"transfer-encoding: chunked", b"content-length: 1000"])
async def test_an_answer_that_breaks_off_never_ends_cleanly(
    router: Running, start_worker: StartWorker, framing: bytes
) -> None:
    async def cut(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n" + b"9\r\ndata: 1\n\n\r\n")
        seen.writer.close()

    worker = await start_worker(cut)
    await router.add(worker)
    async with router.http.post(f"{router.url}/generate") as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    raw = await exchange(router.port, post(b"/generate"))
    assert b"data: 1" in raw.body and b"0\r\n\r\n" not in raw.body
    assert (await router.views())[0]["num_failures"] == 2


@pytest.mark.parametrize(
    "said",
    [
        b"HELLO\r\n\r\n",
        b"HTTP/1.1 999 Odd\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-a: %s\r\n" % (b"a" * 1000) * 200,
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_502(router: Running, start_worker: StartWorker, said: bytes) -> None:
    worker = await start_worker(lambda seen: seen.send(said))
    await router.add(worker)
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == 502 and b"worker_broken" in answer.body


async def test_bytes_after_an_answer_do_not_reach_the_next_request(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(
        lambda seen: seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n")
    )
    await router.add(worker)
    answers = [await exchange(router.port, post(b"/generate")) for _ in range(3)]
    assert {answer.body for answer in answers if answer.status == 200} <= {b"ok"}


async def test_removing_a_worker_lets_its_request_finish(router: Running, start_worker: StartWorker) -> None:
    go = asyncio.Event()

    async def slow(seen: Seen) -> None:
        await go.wait()
        await seen.answer(b"done")

    worker = await start_worker(slow)
    worker_id = await router.add(worker)
    first = asyncio.create_task(exchange(router.port, post(b"/generate")))
    await worker.arrived()
    async with router.http.delete(f"{router.url}/workers/{worker_id}") as answer:
        assert answer.status == 202
    assert [view["state"] for view in await router.views()] == ["DRAINING"]
    new_id = await router.add(worker)
    go.set()
    answer = await first
    assert (answer.status, answer.body) == (200, b"done")
    views = await router.views()
    assert [(v["id"], v["in_flight"], v["num_requests"]) for v in views] == [(new_id, 0, 0)]


async def test_a_worker_restarted_on_its_address_serves_again(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    worker_id = await router.add(worker)
    await worker.die()
    await router.until_state(worker_id, State.UNREADY)
    await worker.start()
    await router.add(worker)
    answers = [await exchange(router.port, post(b"/generate")) for _ in range(10)]
    assert [answer.status for answer in answers] == [200] * 10 and len(worker.requests) == 10


async def test_registering_again_forgets_that_requests_failed(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(breaker_pause_s=60.0, health_interval_s=60.0)
    bad = await start_worker(lambda seen: seen.answer(b"", status=b"500 Oops"))
    await router.add(bad)
    await router.add(await start_worker())
    for _ in range(10):
        await exchange(router.port, post(b"/generate"))
    assert len(bad.requests) == 3  # its breaker is open
    bad.handler = answer_ok
    await router.add(bad)
    answers = [await exchange(router.port, post(b"/generate")) for _ in range(10)]
    assert [answer.status for answer in answers] == [200] * 10 and len(bad.requests) == 3 + 5


async def test_registering_again_and_again_keeps_no_connection_of_before(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(health_interval_s=60.0, idle_connection_s=60.0)
    worker = await start_worker()
    for _ in range(3):
        await router.add(worker)
        await exchange(router.port, post(b"/generate"))
    await eventually(lambda: worker.num_open == 1, "only the last registration's connection is open")


async def test_a_worker_that_fails_at_once_does_not_draw_the_load(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(breaker_pause_s=60.0)
    bad = await start_worker(lambda seen: seen.answer(b"", status=b"500 Oops"))
    good = await start_worker()
    await router.add(bad)
    await router.add(good)
    statuses = [(await exchange(router.port, post(b"/generate"))).status for _ in range(100)]
    assert statuses.count(500) == len(bad.requests) == 3 and len(good.requests) == 97


async def test_a_client_that_stops_sending_is_told(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(idle_timeout_s=0.3)
    worker = await start_worker()
    await router.add(worker)
    answer = await exchange(
        router.port, b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 9\r\nconnection: close\r\n\r\nx"
    )
    assert answer.status == 408 and b"client_stalled" in answer.body
    views = await router.views()
    assert (views[0]["in_flight"], views[0]["num_failures"]) == (0, 0)


async def test_three_hundred_slow_requests_at_once(router: Running, start_worker: StartWorker) -> None:
    go = asyncio.Event()

    async def slow(seen: Seen) -> None:
        await go.wait()
        await seen.answer()

    worker: FakeWorker = await start_worker(slow)
    await router.add(worker)
    calls = [asyncio.create_task(exchange(router.port, post(b"/generate"))) for _ in range(300)]
    await worker.arrived(300)  # nothing waits for a connection
    go.set()
    assert {answer.status for answer in await asyncio.gather(*calls)} == {200}
