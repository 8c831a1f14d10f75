"""Paths of one engine that mean all engines here."""

import asyncio
import time
from collections.abc import Mapping

import aiohttp
import orjson
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from services.router.control.fan_out import FanOut
from services.router.workers.workers import State
from tests.router.conftest import Running, StartWorker
from tests.router.control.calling import call
from tests.router.fake_worker import Handler, Seen
from tests.router.raw_client import exchange, post

JSON = b"content-type: application/json\r\n"


def answers(by_path: Mapping[str, object], *, status: bytes = b"200 OK") -> Handler:
    """A worker that answers each path with JSON or text, others with 404."""

    async def handler(seen: Seen) -> None:
        content = by_path.get(seen.path.decode())
        if isinstance(content, str):
            await seen.answer(content.encode(), status=status, extra=b"content-type: text/plain; version=0.0.4\r\n")
        elif content is None:
            await seen.answer(b"{}", status=b"404 Not Found", extra=JSON)
        else:
            await seen.answer(orjson.dumps(content), status=status, extra=JSON)

    return handler


async def never(seen: Seen) -> None:
    await asyncio.Event().wait()


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
    with structlog.testing.capture_logs() as lines:
        status, said = await call(router, "POST", "/abort_request", {"rid": "x"})
    assert status == 502 and said["workers"] == {worker.url: 500}
    [told] = [line for line in lines if line["event"] == "worker_call_refused"]
    assert (told["url"], told["status"], told["path"]) == (worker.url, 500, "/abort_request")


async def test_flush_reaches_every_worker(router: Running, start_worker: StartWorker) -> None:
    first, second = await start_worker(), await start_worker()
    for worker in (first, second):
        await router.add(worker)
    for method in ("GET", "POST"):
        status, said = await call(router, method, "/flush_cache?timeout=2")
        assert status == 200 and said["successful"] == [first.url, second.url] and said["failed"] == []
    assert [seen.line.split()[:2] for seen in second.requests] == [
        [b"GET", b"/flush_cache?timeout=2"],
        [b"POST", b"/flush_cache?timeout=2"],
    ]


async def test_a_flush_that_a_busy_worker_refused_is_400_as_from_an_engine(
    router: Running, start_worker: StartWorker
) -> None:
    good = await start_worker()
    busy = await start_worker(lambda seen: seen.answer(b"Flush cache failed.\n", status=b"400 Bad Request"))
    for worker in (good, busy):
        await router.add(worker)
    status, said = await call(router, "POST", "/flush_cache")
    assert status == 400 and said["successful"] == [good.url]
    assert said["failed"] == [[busy.url, "answered 400: Flush cache failed."]]


async def test_without_workers_there_is_no_answer(router: Running) -> None:
    for method, path in (
        ("POST", "/flush_cache"),
        ("GET", "/v1/models"),
        ("GET", "/v1/loads"),
        ("GET", "/get_load"),
        ("GET", "/get_loads"),
    ):
        status, said = await call(router, method, path)
        assert status == 503 and said["error"]["type"] == "no_ready_worker"
    assert (await call(router, "POST", "/abort_request", {"rid": "x"}))[0] == 503


async def test_models_of_all_workers_each_once(router: Running, start_worker: StartWorker) -> None:
    one, two = {"id": "a", "object": "model", "owned_by": "sglang"}, {"id": "b", "object": "model"}
    first = await start_worker(answers({"/v1/models": {"object": "list", "data": [one]}}))
    second = await start_worker(answers({"/v1/models": {"object": "list", "data": [one, two]}}))
    broken = await start_worker(answers({"/v1/models": ["?"]}))
    for worker in (first, second, broken):
        await router.add(worker)
    not_ready = await start_worker()
    not_ready.ready_status = b"503 Starting"
    await router.add(not_ready, until_ready=False)
    status, said = await call(router, "GET", "/v1/models")
    assert status == 200 and said["object"] == "list" and said["data"] == [one, two]
    assert list(said["errors"]) == [broken.url] and not_ready.requests == []


async def test_loads_of_all_workers_are_marked_with_their_worker(router: Running, start_worker: StartWorker) -> None:
    load = {"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 9}
    loads = {"timestamp": "t", "version": "0.5.23", "num_accelerators": 1, "loads": [load]}
    first, second = [await start_worker(answers({"/v1/loads": loads})) for _ in range(2)]
    dead = await start_worker()
    for worker in (first, second, dead):
        await router.add(worker)
    await dead.die()
    status, said = await call(router, "GET", "/v1/loads?include=core,disagg,queues")
    assert status == 200 and said["loads"] == [{"worker": worker.url, **load} for worker in (first, second)]
    assert said["version"] == "0.5.23" and said["num_accelerators"] == 2 and list(said["errors"]) == [dead.url]
    assert first.requests[0].line.split()[1] == b"/v1/loads?include=core,disagg,queues"


async def test_loads_in_the_words_of_older_engines(router: Running, start_worker: StartWorker) -> None:
    new = {"loads": [{"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_total_tokens": 9}]}
    old = [{"dp_rank": 0, "num_reqs": 4, "num_waiting_reqs": 2, "num_tokens": 5}]
    first, second = await start_worker(answers({"/v1/loads": new})), await start_worker(answers({"/get_load": old}))
    for worker in (first, second):
        await router.add(worker)
    async with router.http.get(f"{router.url}/get_load") as answer:
        assert await answer.json() == [
            {"worker": first.url, "dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 9},
            {"worker": second.url, **old[0]},
        ]
    said = (await call(router, "GET", "/get_loads"))[1]
    assert [(load["worker"], load["load"]) for load in said["workers"]] == [(first.url, 3), (second.url, 4)]


async def test_metrics_of_all_engines_are_one_legal_exposition(router: Running, start_worker: StartWorker) -> None:
    text = '# HELP sglang:n Running.\n# TYPE sglang:n gauge\nsglang:n{tp_rank="0"} 3.0\n'
    first, second = [await start_worker(answers({"/metrics": text})) for _ in range(2)]
    off = await start_worker(answers({}))
    for worker in (first, second, off):
        await router.add(worker)
    async with router.http.get(f"{router.url}/engine_metrics") as answer:
        assert answer.status == 200 and answer.content_type == "text/plain"
        families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    assert [sample.labels for sample in families["sglang:n"].samples] == [
        {"worker": worker.url, "tp_rank": "0"} for worker in (first, second)
    ]
    up = {sample.labels["worker"]: sample.value for sample in families["furlong_engine_up"].samples}
    assert up == {first.url: 1.0, second.url: 1.0, off.url: 0.0}


DEEP = b"[" * 1000 + b"]" * 1000
ODD = [
    b"",
    b"[]",
    b"\xff",
    b'{"loads": 7}',
    b'{"data": [1]}',
    b'{"data": [{"id": "a", "x": %b}], "loads": [{"num_reqs": 1, "x": %b}], "more": %b}' % (DEEP, DEEP, DEEP),
    b'{"loads": [{"num_reqs": 1e999, "num_running_reqs": -1e999, "num_tokens": [1]}], "num_accelerators": 1e999}',
    b'{"data": [{"id": "\xed\xa0\x80"}], "loads": [{"a": "\xed\xa0\x80"}]}',
]


@pytest.mark.parametrize("said", ODD, ids=range(len(ODD)))
async def test_whatever_workers_say_is_no_500(router: Running, start_worker: StartWorker, said: bytes) -> None:
    worker = await start_worker(lambda seen: seen.answer(said, extra=JSON))
    await router.add(worker)
    for path in ("/v1/models", "/v1/loads", "/get_load", "/get_loads", "/engine_metrics"):
        async with router.http.get(router.url + path) as answer:
            assert answer.status in (200, 502), path


async def test_a_hanging_worker_costs_an_answer_only_its_own_part(
    router: Running, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.control.fan_out.READ_TIMEOUT_S", 0.2)
    model = {"id": "a", "object": "model"}
    good = await start_worker(answers({"/v1/models": {"object": "list", "data": [model]}}))
    hung = await start_worker(never)
    for worker in (good, hung):
        await router.add(worker)
    timeout = aiohttp.ClientTimeout(5)
    async with router.http.get(f"{router.url}/v1/models", timeout=timeout) as answer:
        said = await answer.json()
    assert said["data"] == [model] and "0.2 s" in said["errors"][hung.url]


async def test_waiting_for_a_turn_counts_in_the_time_that_an_answer_may_take(
    router: Running, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.control.fan_out.READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr("services.router.control.fan_out.MAX_READS", 1)
    hung = [await start_worker(never) for _ in range(4)]
    for worker in hung:
        await router.add(worker)
    began = time.monotonic()
    said = await FanOut().read(router.listening.router.workers.all(), "/metrics")
    assert len(said) == 4 and not any(told.good for told in said) and time.monotonic() - began < 0.9


async def test_a_clients_key_for_the_engines_goes_with_what_it_asks(router: Running, start_worker: StartWorker) -> None:
    plain = await start_worker(answers({"/v1/models": {"object": "list", "data": []}}))
    keyed = await start_worker(answers({"/v1/models": {"object": "list", "data": []}}))
    await router.add(plain)
    worker_id = (await call(router, "POST", "/workers", {"url": keyed.url, "api_key": "k3y"}))[1]["id"]
    await router.until_state(worker_id, State.READY)
    assert (await call(router, "GET", "/v1/models", Authorization="Bearer sk-user"))[0] == 200
    assert plain.requests[0].header(b"authorization") == [b"Bearer sk-user"]
    assert keyed.requests[0].header(b"authorization") == [b"Bearer k3y"]


async def test_as_many_askers_as_may_be_and_no_more(
    router: Running, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.control.fan_out.MAX_READERS", 2)
    release = asyncio.Event()

    async def slow(seen: Seen) -> None:
        await release.wait()
        await answers({"/v1/models": {"data": []}})(seen)

    worker = await start_worker(slow)
    await router.add(worker)
    first = [asyncio.create_task(call(router, "GET", "/v1/models")) for _ in range(2)]
    await worker.arrived(2)
    status, said = await call(router, "GET", "/v1/models")
    assert status == 503 and said["error"]["type"] == "busy"
    release.set()
    assert [(await task)[0] for task in first] == [200, 200]
    assert (await call(router, "GET", "/v1/models"))[0] == 200
