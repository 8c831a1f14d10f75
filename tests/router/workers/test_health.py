"""Probes over real sockets."""

import asyncio

import pytest

from services.router.workers.workers import State
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import Seen
from tests.router.raw_client import exchange, post
from tests.router.test_keep_alive import trust
from tests.router.waiting import eventually


async def test_a_worker_without_ready_is_asked_for_its_health(router: Running, start_worker: StartWorker) -> None:
    async def probe(seen: Seen) -> None:
        await seen.answer(b"", status=b"404 Not Found" if seen.path == b"/ready" else b"200 OK")

    worker = await start_worker()
    worker.probe_handler = probe
    await router.add(worker)
    assert [seen.path for seen in worker.probes[:2]] == [b"/ready", b"/health"]


async def test_a_worker_busy_with_a_request_may_miss_probes(router: Running, start_worker: StartWorker) -> None:
    go, missed = asyncio.Event(), 0

    async def slow(seen: Seen) -> None:
        await go.wait()
        await seen.answer()

    async def no_answer(seen: Seen) -> None:
        nonlocal missed
        missed += 1
        await asyncio.Event().wait()

    worker = await start_worker(slow)
    await router.add(worker)
    call = asyncio.create_task(exchange(router.port, post(b"/generate")))
    await worker.arrived()
    worker.probe_handler = no_answer
    await eventually(lambda: missed >= 5, "five probes were missed")  # 0.3 s each, three in a row would be the end
    assert (await router.views())[0]["state"] == "READY"
    go.set()
    assert (await call).status == 200
    await router.until_state(worker.url, State.UNREADY)  # idle and silent: not busy


async def test_a_worker_that_streams_for_longer_than_it_may_be_silent_may_miss_probes(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(health_busy_grace_s=0.4, health_timeout_s=0.1)
    go, missed = asyncio.Event(), 0

    async def stream(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while not go.is_set():
            await seen.send(b"1\r\nx\r\n")
            await asyncio.sleep(0.02)
        await seen.send(b"0\r\n\r\n")

    async def no_answer(seen: Seen) -> None:
        nonlocal missed
        missed += 1
        await asyncio.Event().wait()

    worker = await start_worker(stream)
    await router.add(worker)
    worker.probe_handler = no_answer
    call = asyncio.create_task(exchange(router.port, post(b"/generate")))
    await worker.arrived()
    await eventually(lambda: missed >= 10, "ten probes were missed")  # a second, and more than three in a row
    assert (await router.views())[0]["state"] == "READY"
    go.set()
    assert (await call).status == 200


async def test_a_name_that_leads_where_no_worker_may_be_gets_no_request(
    router: Running, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = "services.router.http.connections.refused_address"
    monkeypatch.setattr(rule, lambda ip: f"{ip} is a link-local address")  # there is none here to connect to
    worker = await start_worker()
    url = f"http://localhost:{worker.port}"
    async with router.http.post(f"{router.url}/workers", json={"url": url}) as answer:
        assert answer.status == 202
    found = router.listening.router.workers.find(url)
    assert found is not None
    await eventually(lambda: "is a link-local address" in found.last_error, "a probe was refused")
    assert worker.probes == [] and found.state is State.JOINING


async def test_a_probe_missed_now_and_then_changes_nothing(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(health_interval_s=0.02, health_timeout_s=0.1)

    async def every_third_hangs(seen: Seen) -> None:
        if len(worker.probes) % 3 == 0:
            await asyncio.Event().wait()
        await seen.answer()

    worker = await start_worker()
    worker.probe_handler = every_third_hangs
    worker_id = await router.add(worker)
    workers = router.listening.router.workers
    states: list[State] = []
    workers.on_change.append(lambda: states.extend(w.state for w in workers.all()))
    await eventually(lambda: len(worker.probes) >= 20, "twenty probes")
    assert states == [] and workers.find(worker_id).state is State.READY  # type: ignore[union-attr]


async def test_a_late_probe_within_its_limit_is_good(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(health_timeout_s=5.0)

    async def late(seen: Seen) -> None:
        await asyncio.sleep(0.4)
        await seen.answer()

    worker = await start_worker()
    worker.probe_handler = late
    await router.add(worker)


async def test_failed_probes_take_a_worker_out_and_good_ones_bring_it_back(
    router: Running, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker_id = await router.add(worker)
    worker.ready_status = b"500 Oops"
    await router.until_state(worker_id, State.UNREADY)
    assert "500" in str((await router.views())[0]["last_error"])
    worker.ready_status = b"200 OK"
    await router.until_state(worker_id, State.READY)


async def test_probes_and_requests_have_connections_of_their_own(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    await router.add(worker)
    trust(router)
    for _ in range(5):
        await exchange(router.port, post(b"/generate"))
    await eventually(lambda: len(worker.probes) >= 5, "five probes")
    assert len({id(seen.writer) for seen in worker.requests}) == 1
    assert not {id(seen.writer) for seen in worker.probes} & {id(seen.writer) for seen in worker.requests}


async def test_a_removed_worker_is_not_probed(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker()
    worker_id = await router.add(worker)
    assert router.listening.router.remove(worker_id)
    await asyncio.sleep(0)
    count = len(worker.probes)
    other = await start_worker()
    await router.add(other)
    await eventually(lambda: len(other.probes) >= 5, "another worker was probed five times")
    assert len(worker.probes) <= count + 1  # one may have been under way
