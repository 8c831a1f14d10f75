"""The table of behaviour that routers are compared by: our column. benchmarks/router_behaviour.py prints all of it."""

import asyncio
import random
from collections import Counter
from itertools import pairwise

import aiohttp
import pytest

from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import FakeWorker, Seen, wait_gone
from tests.router.raw_client import exchange, get, post

HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + b"x" * 50
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LEFT_LIMIT_S = 0.5
"""A machine that is not busy sees it within 50 ms."""


def event(number: int) -> bytes:
    text = b'data: {"text":"%d"}\n\n' % number
    return b"%x\r\n%s\r\n" % (len(text), text)


async def start(router: Running, worker: FakeWorker) -> Running:
    await router.add(worker)
    return router


async def test_no_worker_is_a_503_that_says_so(start_router: StartRouter) -> None:
    router = await start_router(queue_timeout_s=0.1)
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == 503 and b"no_ready_worker" in answer.body and answer.header(b"retry-after")


async def test_target_headers_and_body_reach_the_worker_as_they_were_sent(
    router: Running, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    await start(router, worker)
    body = b'{ "text" : "\\u00e9",  "unknown": [1 , 2], "text": "again" }'
    sent = b"x-custom: one\r\nX-Custom: two\r\nauthorization: Bearer k\r\nuser-agent: probe\r\ncookie: a=b\r\n"
    answer = await exchange(router.port, post(b"/generate?foo=b%20r&x=1&x=2", body, extra=sent))
    seen = worker.requests[0]
    assert answer.status == 200 and seen.body == body
    assert seen.line == b"POST /generate?foo=b%20r&x=1&x=2 HTTP/1.1"
    assert seen.header(b"host") == [worker.url.removeprefix("http://").encode()]
    assert seen.header(b"x-custom") == [b"one", b"two"]
    for name, value in ((b"authorization", b"Bearer k"), (b"user-agent", b"probe"), (b"cookie", b"a=b")):
        assert seen.header(name) == [value]
    assert not seen.header(b"accept") and not seen.header(b"accept-encoding")


@pytest.mark.parametrize("status", [b"400 Bad Request", b"422 Odd", b"500 Broken", b"503 Busy"])
async def test_a_workers_error_is_passed_on_and_never_asked_for_twice(
    router: Running, start_worker: StartWorker, status: bytes
) -> None:
    worker = await start_worker(lambda seen: seen.answer(b'{"error":"mine"}', status=status))
    other = await start_worker(lambda seen: seen.answer(b'{"error":"mine"}', status=status))
    await start(router, worker)
    await start(router, other)
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == int(status[:3]) and answer.body == b'{"error":"mine"}'
    assert len(worker.requests) + len(other.requests) == 1


async def test_a_worker_that_closes_without_an_answer_is_a_502_after_one_hit(
    router: Running, start_worker: StartWorker
) -> None:
    async def close(seen: Seen) -> None:
        seen.writer.close()

    workers = [await start_worker(close), await start_worker(close)]
    for worker in workers:
        await start(router, worker)
    answer = await exchange(router.port, post(b"/generate"))
    assert answer.status == 502 and b"worker_broken" in answer.body
    assert sum(len(worker.requests) for worker in workers) == 1


async def test_half_an_answer_is_never_made_to_look_whole(router: Running, start_worker: StartWorker) -> None:
    async def half(seen: Seen) -> None:
        await seen.send(HALF)
        seen.writer.close()

    worker = await start_worker(half)
    await start(router, worker)
    with pytest.raises(aiohttp.ClientPayloadError):
        async with router.http.post(f"{router.url}/generate", json={}) as answer:
            await answer.read()
    raw = await exchange(router.port, post(b"/generate"))
    assert raw.status == 200 and raw.header(b"content-length") == [b"100"] and raw.body == b"x" * 50
    assert len(worker.requests) == 2


async def test_a_stream_that_breaks_never_ends_cleanly(router: Running, start_worker: StartWorker) -> None:
    async def break_off(seen: Seen) -> None:
        await seen.send(STREAM + event(1) + event(2))
        seen.writer.close()

    await start(router, await start_worker(break_off))
    for path in (b"/generate", b"/v1/completions"):
        raw = await exchange(router.port, post(path))
        assert raw.status == 200 and b'{"text":"2"}' in raw.body
        assert b"0\r\n\r\n" not in raw.body and b"[DONE]" not in raw.body and b"error" not in raw.body


async def test_pieces_pass_as_they_come(router: Running, start_worker: StartWorker) -> None:
    seen_by_client = asyncio.Event()

    async def drip(seen: Seen) -> None:
        await seen.send(STREAM + event(1))
        await seen_by_client.wait()
        await seen.send(event(2) + b"0\r\n\r\n")

    await start(router, await start_worker(drip))
    async with router.http.post(f"{router.url}/generate", json={"stream": True}) as answer:
        assert await answer.content.readany() == b'data: {"text":"1"}\n\n'
        seen_by_client.set()
        assert await answer.content.read() == b'data: {"text":"2"}\n\n'


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_upstream_along(
    router: Running, start_worker: StartWorker, stream: bool
) -> None:
    async def work(seen: Seen) -> None:
        if stream:
            await seen.send(STREAM + event(1))
        await wait_gone(seen)

    worker = await start_worker(work)
    await start(router, worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(post(b"/generate"))
    seen = (await worker.arrived())[0]
    if stream:
        await reader.readuntil(b"\r\n\r\n")
    left = asyncio.get_running_loop().time()
    writer.transport.abort()
    await asyncio.wait_for(seen.gone.wait(), 5)
    assert asyncio.get_running_loop().time() - left < LEFT_LIMIT_S


async def test_one_of_two_workers_dies_and_only_its_own_requests_are_lost(
    router: Running, start_worker: StartWorker
) -> None:
    go = asyncio.Event()

    async def hold(seen: Seen) -> None:
        await go.wait()
        await seen.answer()

    workers = [await start_worker(hold), await start_worker(hold)]
    for worker in workers:
        await start(router, worker)
    asked = [asyncio.create_task(exchange(router.port, post(b"/generate"))) for _ in range(40)]
    await asyncio.gather(workers[0].arrived(20), workers[1].arrived(20))
    await workers[0].die()
    go.set()
    assert Counter(answer.status for answer in await asyncio.gather(*asked)) == {200: 20, 502: 20}
    assert sum(len(worker.requests) for worker in workers) == 40
    later = [(await exchange(router.port, post(b"/generate"))).status for _ in range(40)]
    assert later == [200] * 40


async def test_no_post_is_lost_or_doubled_where_the_worker_closes_idle_connections(
    router: Running, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.keep_alive_s = 0.005
    await start(router, worker)
    chance = random.Random(4)
    for _ in range(300):
        async with router.http.post(f"{router.url}/generate", json={}) as answer:
            assert answer.status == 200
            await answer.read()
        await asyncio.sleep(chance.uniform(0.0035, 0.0062))  # about when the worker closes, which is the point
    assert len(worker.requests) == 300


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"HEAD", b"OPTIONS"])
async def test_a_path_that_the_router_does_not_know_is_the_workers_matter(
    router: Running, start_worker: StartWorker, method: bytes
) -> None:
    worker = await start_worker(lambda seen: seen.answer(b"", status=b"404 Not Here"))
    await start(router, worker)
    for target in (b"/some/path?x=1", b"/v1/new_thing", b"/missing", b"/a%2Fb//c"):
        assert (await exchange(router.port, get(target, method=method))).status == 404
        assert worker.requests[-1].line == method + b" " + target + b" HTTP/1.1"


async def test_a_chunked_body_passes(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await start(router, worker)
    pieces = b'5\r\n{"tex\r\n6;name=value\r\nt":"a"\r\n1\r\n}\r\n0\r\n\r\n'
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await exchange(router.port, head + pieces)
    assert answer.status == 200 and worker.requests[0].body == b'{"text":"a"}'


async def test_answers_of_one_client_connection_keep_their_order(router: Running, start_worker: StartWorker) -> None:
    async def slower_first(seen: Seen) -> None:
        number = int(seen.path[1:])
        await asyncio.sleep(0.02 * (3 - number))
        await seen.answer(b"%d" % number)

    await start(router, await start_worker(slower_first))
    requests = [get(b"/%d" % number).replace(b"connection: close\r\n", b"") for number in range(3)]
    answer = await exchange(router.port, b"".join(requests) + get(b"/3"))
    places = [(answer.head + b"\r\n\r\n" + answer.body).find(b"\r\n\r\n%d" % number) for number in range(4)]
    assert all(place >= 0 for place in places) and all(first < second for first, second in pairwise(places))
