"""Workers in and out over HTTP."""

import asyncio
from urllib.parse import quote

import pytest

from services.router.workers.workers import State
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.control.calling import call
from tests.router.fake_worker import Seen
from tests.router.raw_client import exchange, get, post
from tests.router.waiting import eventually


async def test_register_list_show_and_remove(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    status, added = await call(router, "POST", "/workers", {"url": worker.url + "/"})
    assert status == 202 and added["url"] == worker.url and added["state"] == "JOINING"
    assert added["status"] == "accepted" and added["location"] == f"/workers/{added['worker_id']}"
    await router.until_state(added["id"], State.READY)
    assert (await call(router, "GET", "/list_workers"))[1] == {"urls": [worker.url]}
    shown = (await call(router, "GET", f"/workers/{added['id']}"))[1]
    only_then = {"status", "worker_id", "location", "message"}
    kept = {key: value for key, value in added.items() if key not in only_then}
    assert shown == (await router.views())[0] == {**kept, "state": "READY", "is_healthy": True}
    status, said = await call(router, "DELETE", f"/workers/{added['id']}")
    assert status == 202 and said["worker_id"] == added["id"] and said["urls"] == []
    status, said = await call(router, "DELETE", f"/workers/{added['id']}")
    assert status == 404 and said["error"]["type"] == "unknown_worker"


@pytest.mark.parametrize("quoted", [True, False])
async def test_delete_by_address(router: Running, start_worker: StartWorker, *, quoted: bool) -> None:
    worker = await start_worker()
    await router.add(worker, until_ready=False)
    path = quote(worker.url, safe="") if quoted else worker.url
    answer = await exchange(router.port, get(b"/workers/" + path.encode(), method=b"DELETE"))
    assert answer.status == 202 and await router.views() == []


async def test_what_is_said_of_a_worker_is_shown_but_for_its_key(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    asked = {"url": worker.url, "labels": {"pool": "eval"}, "priority": 7, "api_key": "s3cr3t", "model_id": "m"}
    status, added = await call(router, "POST", "/workers", asked)
    assert status == 202 and (added["labels"], added["priority"], added["worker_type"]) == (
        {"pool": "eval"},
        7,
        "regular",
    )
    listed = (await call(router, "GET", "/workers"))[1]
    assert listed["total"] == 1 and listed["stats"]["by_type"] == {"regular": 1, "prefill": 0, "decode": 0}
    assert "s3cr3t" not in f"{added}{listed}"


async def test_a_leaving_worker_is_shown_until_its_last_answer(router: Running, start_worker: StartWorker) -> None:
    finish = asyncio.Event()

    async def slow(seen: Seen) -> None:
        await finish.wait()
        await seen.answer(b"done")

    worker = await start_worker(slow)
    worker_id = await router.add(worker)
    answer = asyncio.create_task(exchange(router.port, post(b"/generate")))
    await worker.arrived()
    for _ in range(2):  # the second time it is leaving already
        status, said = await call(router, "DELETE", f"/workers/{worker_id}")
        assert status == 202 and said["in_flight"] == 1
    shown = (await call(router, "GET", f"/workers/{worker_id}"))[1]
    assert shown["state"] == "DRAINING" and not shown["is_healthy"]
    finish.set()
    assert (await answer).body == b"done"
    assert (await call(router, "GET", f"/workers/{worker_id}"))[0] == 404


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
        b'{"url": "file://127.0.0.1:30000"}',
        b'{"url": "ftp://127.0.0.1:30000"}',
        b'{"url": ""}',
        b'{"url": null}',
        b'{"url": ["http://a"]}',
        b"{}",
        b"[]",
        b"7",
        b"",
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"url": "http://a", "labels": {"a,b": "c"}}',
        b'{"url": "http://a", "labels": {"a": 1}}',
        b'{"url": "http://a", "priority": "7"}',
        b'{"url": "http://a", "priority": 1e99}',
        b'{"url": "http://a", "api_key": "a\\r\\nx: y"}',
        b'{"url": "http://a", "worker_type": "prefill", "bootstrap_port": 1}',
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
    assert (await call(router, "POST", "/workers", {"url": "http://127.0.0.1:1"}))[0] == 202
    status, said = await call(router, "POST", "/workers", {"url": "http://127.0.0.1:2"})
    assert status == 429 and "--router-max-workers" in said["error"]["message"]


async def test_a_web_page_may_not_register_workers(router: Running) -> None:
    status, said = await call(router, "POST", "/workers", {"url": "http://127.0.0.1:1"}, Origin="http://evil.example")
    assert status == 403 and said["error"]["type"] == "origin_refused"


async def test_unknown_control_calls_are_json(router: Running) -> None:
    assert (await call(router, "GET", "/router/nothing"))[0] == 404
    status, said = await call(router, "PUT", "/workers")
    assert status == 405 and said["error"]["type"] == "method_not_allowed"
    answer = await exchange(router.port, get(b"/workers", method=b"PUT"))
    assert answer.header(b"allow") == [b"GET, POST"]


async def test_hosts_outside_the_allow_list_are_400(start_router: StartRouter) -> None:
    router = await start_router(worker_allow=("127.0.0.0/8", "engine.example:30000"))
    for url in ("http://127.0.0.1:1", "http://engine.example:30000"):
        assert (await call(router, "POST", "/workers", {"url": url}))[0] == 202
    for url in ("http://10.0.0.1:1", "http://engine.example:30001", "http://evil.example:30000"):
        status, said = await call(router, "POST", "/workers", {"url": url})
        assert status == 400 and said["error"]["type"] == "bad_url"


async def test_a_generation_that_its_client_gave_up_is_ended_where_it_runs(
    router: Running, start_worker: StartWorker
) -> None:
    """A client that timed out aborts by rid: every worker is told, and nothing is left running."""
    told = asyncio.Event()

    async def slow(seen: Seen) -> None:
        if seen.path == b"/abort_request":
            told.set()
        await told.wait()
        await seen.answer(b"partial")

    owner, other = await start_worker(slow), await start_worker()
    await router.add(owner)
    with pytest.raises(TimeoutError):
        await exchange(router.port, post(b"/generate", b'{"rid":"x"}'), timeout_s=0.2)
    await router.add(other)
    status, said = await call(router, "POST", "/abort_request", {"rid": "x"})
    assert status == 200 and said["workers"] == {owner.url: 200, other.url: 200} and told.is_set()
    await eventually(lambda: all(w.in_flight == 0 for w in router.listening.router.workers.all()), "nothing runs")
