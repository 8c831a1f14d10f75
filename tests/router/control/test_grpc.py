"""furlong.v1.Router over a real channel, as the rollout service uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import pytest

from furlong import rpc
from furlong.v1 import router_pb2 as pb
from furlong.v1.router_pb2_grpc import RouterStub
from services.router.control import grpc_service
from services.router.control.grpc_service import NAME
from tests.router.conftest import Running, StartWorker
from tests.router.fake_worker import Seen
from tests.router.raw_client import exchange, post
from tests.router.waiting import eventually

if TYPE_CHECKING:  # the stubs' own name for a stub of an asyncio channel; it has no value
    from furlong.v1.router_pb2_grpc import RouterAsyncStub

LIMIT_S = 5.0


@pytest.fixture
async def stub(router: Running) -> AsyncGenerator[RouterAsyncStub]:
    async with rpc.aio_channel(router.grpc) as channel:
        yield cast("RouterAsyncStub", RouterStub(channel))


async def state_of(stub: RouterAsyncStub, worker_id: str) -> int:
    workers = (await stub.ListWorkers(pb.ListWorkersRequest(), timeout=LIMIT_S)).workers
    return next(worker.state for worker in workers if worker.worker_id == worker_id)


async def until_state(stub: RouterAsyncStub, worker_id: str, state: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        async for seen in stub.WatchWorkers(pb.WatchWorkersRequest()):
            if any(w.worker_id == worker_id and w.state == state for w in seen.workers):
                return


async def test_an_engine_takes_requests_once_its_version_is_confirmed(
    router: Running, stub: RouterAsyncStub, start_worker: StartWorker
) -> None:
    engine = await start_worker()
    added = (await stub.AddWorker(pb.AddWorkerRequest(url=engine.url), timeout=LIMIT_S)).worker
    assert added.state == pb.WORKER_STATE_JOINING and not added.HasField("policy_version")
    await eventually(lambda: len(engine.probes) >= 3, "probes were answered")
    assert await state_of(stub, added.worker_id) == pb.WORKER_STATE_JOINING
    await stub.SetWorkerState(pb.SetWorkerStateRequest(worker=added.worker_id, admit=True), timeout=LIMIT_S)
    assert await state_of(stub, added.worker_id) == pb.WORKER_STATE_JOINING  # of which version?
    waiting = asyncio.create_task(exchange(router.port, post(b"/generate")))
    said = await stub.SetWorkerState(
        pb.SetWorkerStateRequest(worker=added.worker_id, admit=True, policy_version=0), timeout=LIMIT_S
    )
    assert said.worker.state == pb.WORKER_STATE_READY and said.worker.HasField("policy_version")
    assert (await waiting).status == 200


async def test_an_engine_gets_nothing_new_during_an_update(
    router: Running, stub: RouterAsyncStub, start_worker: StartWorker
) -> None:
    engine = await start_worker()
    await stub.AddWorker(pb.AddWorkerRequest(url=engine.url), timeout=LIMIT_S)
    await stub.SetWorkerState(
        pb.SetWorkerStateRequest(worker=engine.url, admit=True, policy_version=1), timeout=LIMIT_S
    )
    assert (await exchange(router.port, post(b"/generate"))).status == 200
    said = await stub.SetWorkerState(pb.SetWorkerStateRequest(worker=engine.url, admit=False), timeout=LIMIT_S)
    assert said.worker.state == pb.WORKER_STATE_UNREADY and not said.worker.HasField("policy_version")
    engine.ready_status = b"503 Paused"
    waiting = asyncio.create_task(exchange(router.port, post(b"/generate")))
    probed = len(engine.probes)
    await eventually(lambda: len(engine.probes) > probed + 5, "probes were refused")
    assert len(engine.requests) == 1
    engine.ready_status = b"200 OK"
    said = await stub.SetWorkerState(
        pb.SetWorkerStateRequest(worker=engine.url, admit=True, policy_version=2), timeout=LIMIT_S
    )
    assert said.worker.state == pb.WORKER_STATE_READY  # at once, without a probe in between
    assert (await waiting).status == 200


async def test_an_engine_restarted_by_itself_waits_for_confirmation(
    router: Running, stub: RouterAsyncStub, start_worker: StartWorker
) -> None:
    engine = await start_worker()
    worker_id = (await stub.AddWorker(pb.AddWorkerRequest(url=engine.url), timeout=LIMIT_S)).worker.worker_id
    await stub.SetWorkerState(pb.SetWorkerStateRequest(worker=worker_id, admit=True, policy_version=4), timeout=LIMIT_S)
    await until_state(stub, worker_id, pb.WORKER_STATE_READY)
    await engine.die()
    await until_state(stub, worker_id, pb.WORKER_STATE_UNREADY)
    await engine.start()
    probed = len(engine.probes)
    await eventually(lambda: len(engine.probes) > probed + 3, "it answers probes again")
    assert await state_of(stub, worker_id) == pb.WORKER_STATE_UNREADY
    await stub.SetWorkerState(pb.SetWorkerStateRequest(worker=worker_id, admit=True, policy_version=4), timeout=LIMIT_S)
    await until_state(stub, worker_id, pb.WORKER_STATE_READY)


async def test_watchers_see_workers_come_and_go(
    router: Running, stub: RouterAsyncStub, start_worker: StartWorker
) -> None:
    engine = await start_worker()
    lists = aiter(stub.WatchWorkers(pb.WatchWorkersRequest(), timeout=LIMIT_S))
    assert list((await anext(lists)).workers) == []
    request = pb.AddWorkerRequest(url=engine.url, admit_without_policy_version=True)
    await stub.AddWorker(request, timeout=LIMIT_S)
    while (states := [w.state for w in (await anext(lists)).workers]) != [pb.WORKER_STATE_READY]:
        assert states == [pb.WORKER_STATE_JOINING]
    await stub.RemoveWorker(pb.RemoveWorkerRequest(worker=engine.url), timeout=LIMIT_S)
    assert list((await anext(lists)).workers) == []


async def test_a_change_is_written_out_once_however_many_watch(
    router: Running, stub: RouterAsyncStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[pb.ListWorkersResponse] = []
    monkeypatch.setattr(grpc_service, "_list", lambda workers: made.append(pb.ListWorkersResponse()) or made[-1])
    watchers = [aiter(stub.WatchWorkers(pb.WatchWorkersRequest(), timeout=LIMIT_S)) for _ in range(20)]
    for watcher in watchers:
        await anext(watcher)
    changes: list[None] = []
    router.listening.router.workers.on_change.append(lambda: changes.append(None))
    made.clear()
    await stub.AddWorker(pb.AddWorkerRequest(url="http://127.0.0.1:1"), timeout=LIMIT_S)
    for watcher in watchers:
        await anext(watcher)
    assert 1 <= len(made) <= len(changes) < len(watchers)


async def test_registering_again_is_a_new_registration(stub: RouterAsyncStub, start_worker: StartWorker) -> None:
    engine = await start_worker()
    first = (await stub.AddWorker(pb.AddWorkerRequest(url=engine.url), timeout=LIMIT_S)).worker
    await stub.SetWorkerState(
        pb.SetWorkerStateRequest(worker=first.worker_id, admit=True, policy_version=1), timeout=LIMIT_S
    )
    second = (await stub.AddWorker(pb.AddWorkerRequest(url=engine.url + "/"), timeout=LIMIT_S)).worker
    listed = (await stub.ListWorkers(pb.ListWorkersRequest(), timeout=LIMIT_S)).workers
    assert [w.worker_id for w in listed] == [second.worker_id] != [first.worker_id]
    assert not listed[0].HasField("policy_version")


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "http://169.254.169.254", "http://u:p@h"])
async def test_a_bad_address_is_an_invalid_argument(stub: RouterAsyncStub, url: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.AddWorker(pb.AddWorkerRequest(url=url), timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_worker_is_not_found(stub: RouterAsyncStub) -> None:
    for call in (
        stub.RemoveWorker(pb.RemoveWorkerRequest(worker="worker-x"), timeout=LIMIT_S),
        stub.SetWorkerState(pb.SetWorkerStateRequest(worker="http://127.0.0.1:1"), timeout=LIMIT_S),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_says_serving(router: Running) -> None:
    assert await asyncio.to_thread(rpc.is_serving, router.grpc, NAME)


async def test_labels_priority_and_breaker_are_told_and_the_key_is_not(
    stub: RouterAsyncStub, start_worker: StartWorker
) -> None:
    engine = await start_worker()
    request = pb.AddWorkerRequest(url=engine.url, labels={"pool": "eval"}, priority=-3, api_key="s3cr3t")
    added = (await stub.AddWorker(request, timeout=LIMIT_S)).worker
    (listed,) = (await stub.ListWorkers(pb.ListWorkersRequest(), timeout=LIMIT_S)).workers
    for worker in (added, listed):
        assert (dict(worker.labels), worker.priority, worker.worker_type) == ({"pool": "eval"}, -3, "regular")
        assert worker.breaker == "closed" and "s3cr3t" not in str(worker)


@pytest.mark.parametrize(
    "request_",
    [
        pb.AddWorkerRequest(url="http://h:1", labels={"a=b": "c"}),
        pb.AddWorkerRequest(url="http://h:1", labels={"a": ""}),
        pb.AddWorkerRequest(url="http://h:1", api_key="a\r\nb"),
        pb.AddWorkerRequest(url="http://h:1", worker_type="prefill"),
    ],
)
async def test_bad_words_about_a_worker_are_an_invalid_argument(
    stub: RouterAsyncStub, request_: pb.AddWorkerRequest
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.AddWorker(request_, timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert list((await stub.ListWorkers(pb.ListWorkersRequest(), timeout=LIMIT_S)).workers) == []


async def test_a_leaving_worker_is_not_set_again(
    router: Running, stub: RouterAsyncStub, start_worker: StartWorker
) -> None:
    """The rollout service is told NOT_FOUND, and so registers the engine anew."""
    finish = asyncio.Event()

    async def slow(seen: Seen) -> None:
        await finish.wait()
        await seen.answer(b"done")

    engine = await start_worker(slow)
    worker_id = await router.add(engine)
    answer = asyncio.create_task(exchange(router.port, post(b"/generate")))
    await engine.arrived()
    await stub.RemoveWorker(pb.RemoveWorkerRequest(worker=worker_id), timeout=LIMIT_S)
    assert await state_of(stub, worker_id) == pb.WORKER_STATE_DRAINING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.SetWorkerState(pb.SetWorkerStateRequest(worker=worker_id, admit=True), timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    finish.set()
    assert (await answer).body == b"done"
