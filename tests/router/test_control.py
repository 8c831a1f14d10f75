"""Workers in and out over HTTP, and how the router says it is."""

import asyncio
from urllib.parse import quote

import pytest

from services.router.workers.workers import State
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import Seen
from tests.router.raw_client import exchange, get, post
from tests.router.waiting import eventually


async def call(router: Running, method: str, path: str, json: object = None, **headers: str) -> tuple[int, dict]:
    async with router.http.request(method, router.url + path, json=json, headers=headers) as answer:
        assert answer.content_type == "application/json"
        return answer.status, await answer.json()


async def test_not_ready_until_a_worker_is(router: Running, start_worker: StartWorker) -> None:
    assert (await call(router, "GET", "/healthz"))[0] == 200
    for path in ("/readyz", "/health", "/health_generate", "/ready"):
        status, said = await call(router, "GET", path)
        assert status == 503 and said["error"]["type"] == "no_ready_worker"
    worker = await start_worker()
    worker.ready_status = b"503 Paused"
    await router.add(worker, until_ready=False)
    assert (await call(router, "GET", "/readyz"))[0] == 503
    worker.ready_status = b"200 OK"
    await router.until_state(worker.url, State.READY)
    for path in ("/readyz", "/health", "/health_generate", "/ready"):
        assert (await call(router, "GET", path))[0] == 200
    assert worker.requests == []


async def test_register_list_show_and_remove(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    status, added = await call(router, "POST", "/workers", {"url": worker.url + "/"})
    assert status == 200 and added["url"] == worker.url and added["state"] == "JOINING"
    await router.until_state(added["id"], State.READY)
    assert (await call(router, "GET", "/list_workers"))[1] == {"urls": [worker.url]}
    shown = (await call(router, "GET", f"/workers/{added['id']}"))[1]
    assert shown == (await router.views())[0] == {**added, "state": "READY"}
    assert (await call(router, "DELETE", f"/workers/{added['id']}")) == (200, {"urls": []})
    status, said = await call(router, "DELETE", f"/workers/{added['id']}")
    assert status == 404 and said["error"]["type"] == "unknown_worker"


@pytest.mark.parametrize("quoted", [True, False])
async def test_delete_by_address(router: Running, start_worker: StartWorker, *, quoted: bool) -> None:
    worker = await start_worker()
    await router.add(worker, until_ready=False)
    path = quote(worker.url, safe="") if quoted else worker.url
    answer = await exchange(router.port, get(b"/workers/" + path.encode(), method=b"DELETE"))
    assert answer.status == 200 and await router.views() == []


async def test_the_old_calls(router: Running, start_worker: StartWorker) -> None:
    first, second = await start_worker(), await start_worker()
    assert (await call(router, "POST", f"/add_worker?url={first.url}"))[0] == 200
    assert (await call(router, "POST", "/add_worker", {"url": second.url}))[0] == 200
    assert (await call(router, "GET", "/list_workers"))[1] == {"urls": [first.url, second.url]}
    assert (await call(router, "POST", f"/remove_worker?url={first.url}"))[0] == 200
    assert (await call(router, "POST", "/remove_worker", {"url": second.url})) == (200, {"urls": []})
    assert (await call(router, "POST", f"/remove_worker?url={first.url}"))[0] == 404


@pytest.mark.parametrize(
    "body",
    [
        b'{"url": "http://169.254.169.254/"}',
        b'{"url": "file:///etc/passwd"}',
        b'{"url": ""}',
        b'{"url": null}',
        b'{"url": ["http://a"]}',
        b"{}",
        b"[]",
        b"7",
        b"",
        b"not json",
        b"\xff\xfe",
        b'{"url": "http://' + b"a" * 2**20 + b'"}',
    ],
)
async def test_bad_registrations_are_400_as_json(router: Running, body: bytes) -> None:
    answer = await exchange(router.port, post(b"/workers", body))
    assert answer.status == 400 and answer.header(b"content-type") == [b"application/json"]
    assert await router.views() == []


async def test_what_answers_no_http_never_gets_a_request(router: Running, start_worker: StartWorker) -> None:
    """A port of something else, such as a data store, may be registered; it stays without requests."""
    other = await start_worker()
    other.probe_handler = lambda seen: seen.send(b"-ERR unknown command\r\n")
    worker_id = await router.add(other, until_ready=False)
    await eventually(lambda: len(other.probes) >= 4, "four probes")
    assert (await call(router, "GET", f"/workers/{worker_id}"))[1]["state"] == "JOINING"


async def test_number_of_workers_is_limited(start_router: StartRouter) -> None:
    router = await start_router(max_workers=1)
    assert (await call(router, "POST", "/workers", {"url": "http://127.0.0.1:1"}))[0] == 200
    status, said = await call(router, "POST", "/workers", {"url": "http://127.0.0.1:2"})
    assert status == 429 and "--router-max-workers" in said["error"]["message"]


async def test_a_web_page_may_not_register_workers(router: Running) -> None:
    status, said = await call(router, "POST", "/workers", {"url": "http://127.0.0.1:1"}, Origin="http://evil.example")
    assert status == 403 and said["error"]["type"] == "origin_refused"


async def test_unknown_control_calls_are_json(router: Running) -> None:
    assert (await call(router, "GET", "/router/nothing"))[0] == 404
    assert (await call(router, "PUT", "/workers"))[0] == 405


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT"])
async def test_admin_calls_reach_no_worker(router: Running, start_worker: StartWorker, method: bytes) -> None:
    worker = await start_worker()
    await router.add(worker)
    for path in (b"/update_weights_from_tensor", b"//start_profile", b"/%70ause_generation", b"/flush_cache?timeout=1"):
        answer = await exchange(router.port, get(path, method=method))
        assert answer.status == 403 and b"rollout" in answer.body
    assert worker.requests == []


async def test_abort_reaches_every_worker(router: Running, start_worker: StartWorker) -> None:
    first, second = await start_worker(), await start_worker()
    await router.add(first)
    await router.add(second)
    status, said = await call(router, "POST", "/abort_request", {"rid": "x", "abort_message": "m"})
    assert status == 200 and said["workers"] == {first.url: 200, second.url: 200}
    assert [worker.requests[0].body for worker in (first, second)] == [b'{"rid":"x"}'] * 2


async def test_abort_ends_the_generation_of_a_removed_worker(router: Running, start_worker: StartWorker) -> None:
    aborted = asyncio.Event()

    async def handler(seen: Seen) -> None:
        if seen.path == b"/abort_request":
            aborted.set()
        await aborted.wait()
        await seen.answer(b"partial")

    worker = await start_worker(handler)
    await router.add(worker)
    generation = asyncio.create_task(exchange(router.port, post(b"/generate", b'{"rid":"x"}')))
    await worker.arrived()
    assert (await call(router, "POST", f"/remove_worker?url={worker.url}"))[0] == 200
    assert (await call(router, "POST", "/abort_request", {"rid": "x"}))[0] == 200
    assert (await generation).body == b"partial"


@pytest.mark.parametrize(
    ("body", "status"), [(b'{"abort_all":true}', 403), (b"{}", 400), (b'{"rid":7}', 400), (b"x", 400), (b"[]", 400)]
)
async def test_abort_only_by_rid(router: Running, start_worker: StartWorker, body: bytes, status: int) -> None:
    worker = await start_worker()
    await router.add(worker)
    assert (await exchange(router.port, post(b"/abort_request", body))).status == status
    assert worker.requests == []


async def test_an_abort_that_no_worker_took_is_an_error(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(lambda seen: seen.answer(b"", status=b"500 Oops"))
    await router.add(worker)
    status, said = await call(router, "POST", "/abort_request", {"rid": "x"})
    assert status == 502 and said["workers"] == {worker.url: 500}


async def test_too_large_a_head_is_refused(router: Running) -> None:
    answer = await exchange(router.port, get(b"/x", extra=b"x-a: %s\r\n" % (b"a" * 1000) * 100))
    assert answer.status == 431 and b"head_too_large" in answer.body
    assert (await exchange(router.port, get(b"/" + b"a" * 100_000))).status in (400, 431)


@pytest.mark.parametrize("begin", [b"GET /", b"GET /x HTTP/1.1\r\nx-a: "])
async def test_a_head_without_end_is_cut_off(router: Running, begin: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(begin)
    sent = 0
    with pytest.raises(ConnectionError):
        while sent < 50_000_000:
            writer.write(b"a" * 65536)
            await writer.drain()
            sent += 65536
    assert sent < 8_000_000


async def test_counters(router: Running, start_worker: StartWorker) -> None:
    await router.add(await start_worker(lambda seen: seen.answer(b"", status=b"500 Oops")))
    for _ in range(2):
        await exchange(router.port, post(b"/generate"))
    said = (await call(router, "GET", "/router/metrics"))[1]
    assert said == {
        "num_workers": 1,
        "num_ready_workers": 1,
        "num_waiting": 0,
        "num_in_flight": 0,
        "num_requests": 2,
        "num_failures": 2,
    }
