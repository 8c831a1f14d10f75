"""Engines' admin paths through the router: refused without a token, to one or all workers with it."""

from pathlib import Path

import pytest

from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.control.calling import call
from tests.router.fake_worker import Seen
from tests.router.raw_client import exchange, get, post

TOKEN = "t0ken-of-the-router"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def guarded(start_router: StartRouter, tmp_path: Path) -> Running:
    """A router with a token."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    router = await start_router(token_file=str(file))
    router.http.headers.update(AUTHORIZED)
    return router


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT"])
async def test_admin_calls_reach_no_worker(router: Running, start_worker: StartWorker, method: bytes) -> None:
    worker = await start_worker()
    await router.add(worker)
    paths = (
        b"/update_weights_from_tensor",
        b"/update_weights_from_disk",
        b"/init_weights_update_group",
        b"/start_profile",
        b"//start_profile",
        b"/%70ause_generation",
        b"/pause_generation?x=1",
        b"/v1/load_lora_adapter",
    )
    for path in paths:
        answer = await exchange(router.port, get(path, method=method))
        assert answer.status == 403 and b"rollout" in answer.body
    assert worker.requests == []


async def test_a_token_that_no_router_has_opens_nothing(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    status, said = await call(router, "POST", "/pause_generation", {}, **AUTHORIZED)
    assert status == 403 and said["error"]["type"] == "admin_path_refused" and worker.requests == []


async def test_an_admin_call_reaches_every_worker(guarded: Running, start_worker: StartWorker) -> None:
    first = await start_worker(lambda seen: seen.answer(b'{"status": "ok"}'))
    second = await start_worker(lambda seen: seen.answer(b"Start profiling.\n"))
    for worker in (first, second):
        await guarded.add(worker)
    status, said = await call(guarded, "POST", "/pause_generation?a=b%20c", {"mode": "in_place"})
    assert status == 200 and said["workers"] == {
        first.url: {"status": 200, "body": {"status": "ok"}},
        second.url: {"status": 200, "body": "Start profiling.\n"},
    }
    seen = second.requests[0]
    assert seen.line == b"POST /pause_generation?a=b%20c HTTP/1.1" and seen.body == b'{"mode": "in_place"}'
    assert seen.header(b"content-type") == [b"application/json"]


@pytest.mark.parametrize("by_id", [True, False])
async def test_a_header_picks_one_worker_whose_answer_comes_as_it_is(
    guarded: Running, start_worker: StartWorker, *, by_id: bool
) -> None:
    picked = await start_worker(
        lambda seen: seen.answer(b'{"success":false}', status=b"400 Bad Request", extra=b"content-type: a/b\r\n")
    )
    other = await start_worker()
    worker_id = await guarded.add(picked)
    await guarded.add(other)
    name = worker_id if by_id else picked.url
    answer = await exchange(
        guarded.port,
        post(
            b"/update_weights_from_disk",
            extra=b"x-furlong-worker: %s\r\nauthorization: Bearer %s\r\n" % (name.encode(), TOKEN.encode()),
        ),
    )
    assert (answer.status, answer.body) == (400, b'{"success":false}')
    assert answer.header(b"content-type") == [b"a/b"] and other.requests == []


async def test_an_unknown_worker_is_404(guarded: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await guarded.add(worker)
    headers = {"x-furlong-worker": "http://127.0.0.1:1"}
    status, said = await call(guarded, "POST", "/pause_generation", {}, **headers)
    assert status == 404 and said["error"]["type"] == "unknown_worker" and worker.requests == []


async def test_a_worker_that_failed_is_told_beside_the_others(guarded: Running, start_worker: StartWorker) -> None:
    good = await start_worker()
    bad = await start_worker(lambda seen: seen.answer(b"no", status=b"500 Oops"))
    dead = await start_worker()
    for worker in (good, bad, dead):
        await guarded.add(worker)
    await dead.die()
    status, said = await call(guarded, "POST", "/release_memory_occupation", {})
    assert status == 502 and said["error"]["type"] == "workers_failed"
    assert said["workers"][good.url]["status"] == 200 and said["workers"][bad.url] == {"status": 500, "body": "no"}
    assert said["workers"][dead.url]["status"] == 0 and "refused" in said["workers"][dead.url]["body"]


async def test_the_routers_token_goes_to_no_worker_but_the_workers_own_key_does(
    guarded: Running, start_worker: StartWorker
) -> None:
    plain, keyed = await start_worker(), await start_worker()
    await guarded.add(plain)
    assert (await call(guarded, "POST", "/workers", {"url": keyed.url, "api_key": "k3y"}))[0] == 202
    assert (await call(guarded, "POST", "/pause_generation", {}))[0] == 200
    assert (await call(guarded, "POST", "/flush_cache"))[0] == 200
    assert [seen.header(b"authorization") for seen in plain.requests] == [[], []]
    assert [seen.header(b"authorization") for seen in keyed.requests] == [[b"Bearer k3y"]] * 2


async def test_abort_all_needs_the_token(guarded: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await guarded.add(worker)
    refused = await exchange(guarded.port, post(b"/abort_request", b'{"abort_all":true}'))
    assert refused.status == 401 and worker.requests == []
    status, said = await call(guarded, "POST", "/abort_request", {"abort_all": True})
    assert status == 200 and said["workers"] == {worker.url: 200}
    assert worker.requests[0].body == b'{"abort_all":true}'


async def test_an_admin_path_must_be_spelled_plainly(guarded: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await guarded.add(worker)
    for path in (
        b"//pause_generation",
        b"/x/../pause_generation",
        b"/PAUSE_generation",
        b"/%70ause_generation",
        b"/pause_generation%20http/1.1%0d%0ax-more:%20a",  # would be a request line and a header of its own
        b"/pause_generation%3fmode=abort",
    ):
        answer = await exchange(guarded.port, get(path, extra=b"authorization: Bearer %s\r\n" % TOKEN.encode()))
        assert answer.status == 400
    assert worker.requests == []


async def test_no_spelling_of_a_workers_name_makes_a_path_that_is_open_to_all(guarded: Running) -> None:
    for path in (b"/workers/x/../../healthz", b"/workers/x%252f..%252f..%252freadyz", b"/router/../metrics"):
        assert (await exchange(guarded.port, get(path, method=b"DELETE"))).status == 401, path


async def test_a_web_page_may_not_flush_by_a_link(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    answer = await exchange(router.port, get(b"/flush_cache", extra=b"sec-fetch-site: cross-site\r\n"))
    assert answer.status == 403 and worker.requests == []


async def test_an_answer_that_cannot_be_nested_is_shown_as_text(guarded: Running, start_worker: StartWorker) -> None:
    deep = b"[" * 1000 + b"]" * 1000
    worker = await start_worker(lambda seen: seen.answer(deep))
    await guarded.add(worker)
    status, said = await call(guarded, "POST", "/pause_generation", {})
    assert status == 200 and said["workers"][worker.url] == {"status": 200, "body": deep.decode()}


async def test_a_large_answer_of_an_admin_call_comes_whole(guarded: Running, start_worker: StartWorker) -> None:
    async def handler(seen: Seen) -> None:
        await seen.answer(b"a" * 2_000_000)

    worker = await start_worker(handler)
    await guarded.add(worker)
    headers = {"x-furlong-worker": worker.url}
    async with guarded.http.get(f"{guarded.url}/get_weights_by_name", headers=headers) as answer:
        assert len(await answer.read()) == 2_000_000
