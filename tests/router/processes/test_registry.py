"""The registry over two processes: what the primary decides is so everywhere, and any process answers for all."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest

from furlong import rpc
from furlong.v1 import router_pb2 as pb
from furlong.v1.router_pb2_grpc import RouterStub
from services.router.processes import primary
from services.router.workers.workers import State
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import FakeWorker, Seen, answer_ok
from tests.router.processes.control import child_pids
from tests.router.processes.talker import Talker, in_flight_ends, one_of_each, talkers
from tests.router.waiting import eventually

if TYPE_CHECKING:  # the stubs' own name for a stub of an asyncio channel; it has no value
    from furlong.v1.router_pb2_grpc import RouterAsyncStub


@asynccontextmanager
async def load(router: Running, number: int) -> AsyncGenerator[list[int]]:
    """So many connections that ask without a pause while inside; the statuses that they got."""
    statuses: list[int] = []
    stop = asyncio.Event()

    async def ask(talker: Talker) -> None:
        while not stop.is_set():
            statuses.append((await talker.generate()).status)

    async with talkers(router, number) as made, asyncio.TaskGroup() as tasks:
        for talker in made:
            tasks.create_task(ask(talker))
        try:
            yield statuses
        finally:
            stop.set()


@asynccontextmanager
async def stub_of(router: Running) -> AsyncGenerator[RouterAsyncStub]:
    async with rpc.aio_channel(router.grpc) as channel:
        yield cast("RouterAsyncStub", RouterStub(channel))


def arrivals(worker: FakeWorker) -> list[float]:
    """Has the worker note when each request came."""
    times: list[float] = []

    async def note(seen: Seen) -> None:
        times.append(time.monotonic())
        await answer_ok(seen)

    worker.handler = note
    return times


async def test_once_admission_was_taken_away_no_process_sends_a_request(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2)
    other, worker = await start_worker(), await start_worker()
    await router.add(other)
    worker_id = await router.add(worker)
    times = arrivals(worker)
    async with stub_of(router) as stub, load(router, 8):
        for _ in range(10):
            before = len(times)
            await eventually(lambda before=before: len(times) > before + 20, "requests arrive")  # type: ignore[misc]
            await stub.SetWorkerState(pb.SetWorkerStateRequest(worker=worker_id, admit=False), timeout=5)
            await in_flight_of(router, worker_id)
            after = time.monotonic()
            num_others = len(other.requests)
            await eventually(lambda: len(other.requests) > num_others + 40, "others are served")  # noqa: B023
            assert not [at for at in times if at > after]
            admit = pb.SetWorkerStateRequest(worker=worker_id, admit=True, policy_version=1)
            await stub.SetWorkerState(admit, timeout=5)
    await in_flight_ends(router)


async def in_flight_of(router: Running, worker_id: str) -> None:
    """Wait for what a worker had before, as whoever updates its weights does."""
    workers = router.listening.router.workers

    def none() -> bool:
        worker = workers.find(worker_id)
        return worker is None or worker.in_flight == 0

    await eventually(none, "what was in flight has ended")


async def test_once_a_worker_was_removed_no_process_sends_a_request(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2)
    other, worker = await start_worker(), await start_worker()
    await router.add(other)
    async with load(router, 8) as statuses:
        for _ in range(5):
            worker_id = await router.add(worker)
            num_requests = len(worker.requests)
            await eventually(lambda: len(worker.requests) > num_requests + 20, "requests arrive")  # noqa: B023
            async with router.http.delete(f"{router.url}/workers/{worker_id}") as answer:
                assert answer.status == 202
            await in_flight_of(router, worker_id)
            num_requests, num_others = len(worker.requests), len(other.requests)
            await eventually(lambda: len(other.requests) > num_others + 40, "others are served")  # noqa: B023
            assert len(worker.requests) == num_requests
    assert set(statuses) == {200}
    async with router.http.get(f"{router.url}/workers/{worker_id}") as answer:
        assert answer.status == 404  # in no process is it leaving still


async def test_a_worker_that_probes_find_dead_is_out_everywhere_at_once(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2, queue_timeout_s=0.05)
    worker = await start_worker()
    worker_id = await router.add(worker)
    async with one_of_each(router) as both:
        worker.ready_status = b"503 Service Unavailable"
        await router.until_state(worker_id, State.UNREADY)
        began = time.monotonic()
        await router.listening.router.settled()
        assert time.monotonic() - began < 0.05
        num_requests = len(worker.requests)
        assert [(await talker.generate()).status for talker in both] == [503, 503]
        assert len(worker.requests) == num_requests
        worker.ready_status = b"200 OK"
        await router.until_state(worker_id, State.READY)
        await router.listening.router.settled()
        assert [(await talker.generate()).status for talker in both] == [200, 200]


async def test_a_connection_that_one_process_finds_refused_is_told_to_all(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2, health_interval_s=60.0, health_timeout_s=60.0)
    dead, alive = await start_worker(), await start_worker()
    dead_id = await router.add(dead)
    await router.add(alive)
    workers = router.listening.router.workers
    async with one_of_each(router) as both:
        await dead.die()
        for talker in both:
            assert (await talker.generate()).status == 200
            assert (await talker.generate()).status == 200
        found = workers.find(dead_id)
        assert found is not None and found.state is State.UNREADY and "refused" in found.last_error


async def test_any_process_answers_for_the_whole(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(processes=2, max_control_body_bytes=1000)
    worker = await start_worker()
    async with one_of_each(router) as both:
        for talker in both:
            added = await talker.ask("POST", "/workers", b'{"url": "%s"}' % worker.url.encode())
            assert added.status == 202
            await router.until_state(added.json["id"], State.READY)
            assert [(await each.generate()).status for each in both] == [200, 200]
            listed = [(await each.ask("GET", "/workers")).json for each in both]
            assert listed[0] == listed[1] and listed[0]["workers"][0]["id"] == added.json["id"]
            assert (await talker.ask("DELETE", f"/workers/{added.json['id']}")).status == 202
            assert [(await each.ask("GET", "/readyz")).status for each in both] == [503, 503]
        assert [(await each.ask("POST", "/workers", b"x" * 1001)).status for each in both] == [413, 413]


async def test_numbers_are_of_all_processes_whoever_is_asked(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2)
    workers = [await start_worker() for _ in range(2)]
    for worker in workers:
        await router.add(worker)
    async with talkers(router, 6) as made:
        for talker in made:
            for _ in range(5):
                await talker.generate()
        for talker in made[:2]:
            text = (await talker.ask("GET", "/metrics")).body.decode()
            lines = [line for line in text.splitlines() if line.startswith("furlong_router_worker_requests_total")]
            assert sum(float(line.split(" ")[1]) for line in lines) == 30
            views = (await talker.ask("GET", "/workers")).json["workers"]
            assert sum(view["num_requests"] for view in views) == 30
            assert {view["url"]: view["num_requests"] for view in views} == {
                worker.url: len(worker.requests) for worker in workers
            }
            assert 'process="0"' in text and 'process="1"' in text


async def test_a_process_that_does_not_take_a_change_in_is_killed_and_started_anew(
    start_router: StartRouter, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primary, "ACK_LIMIT_S", 0.3)
    router = await start_router(processes=2)
    worker = await start_worker()
    worker_id = await router.add(worker)
    (pid,) = child_pids()
    os.kill(pid, signal.SIGSTOP)
    async with stub_of(router) as stub:
        await stub.SetWorkerState(pb.SetWorkerStateRequest(worker=worker_id, admit=False), timeout=5)
    assert pid not in child_pids()
    await eventually(lambda: bool(child_pids()), "another one is there")
