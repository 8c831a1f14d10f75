"""Whoever takes a worker's admission away relies on nothing new arriving there."""

import asyncio

import pytest

from services.router.http.connections import Connections
from services.router.http.upstream import Connection
from tests.router.conftest import Running, StartWorker
from tests.router.raw_client import exchange, post


async def test_a_request_that_was_connecting_when_admission_was_taken_away_goes_elsewhere(
    router: Running, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting, go_on = asyncio.Event(), asyncio.Event()
    open_connection = Connections.open

    async def slowly(self: Connections) -> Connection:
        connecting.set()
        await go_on.wait()
        return await open_connection(self)

    monkeypatch.setattr(Connections, "open", slowly)
    updated, other = await start_worker(), await start_worker()
    worker_id = await router.add(updated)
    asked = asyncio.create_task(exchange(router.port, post(b"/generate")))
    await connecting.wait()
    await router.add(other)
    workers = router.listening.router.workers
    worker = workers.find(worker_id)
    assert worker is not None
    workers.set_state(worker, admit=False, policy_version=None)
    go_on.set()
    assert (await asked).status == 200
    assert (len(updated.requests), len(other.requests)) == (0, 1)
    assert worker.in_flight == 0
