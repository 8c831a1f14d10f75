"""The calls that SGLang, slime and Miles make to a router, made as they make them and read as they read them.

Which calls those are was read from their sources (SGLang 0.5.23, sgl-router 0.2 and 0.3; slime and Miles of 2026-11);
the code here is our own.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal, TypeVar
from urllib.parse import quote
from uuid import UUID

import httpx
import pytest
import requests
from pydantic import BaseModel

from tests.router.conftest import Running, StartWorker
from tests.router.control.engine import Engine
from tests.router.fake_worker import FakeWorker

LIMIT_S = 10.0
Result = TypeVar("Result")


async def in_thread(client: Callable[..., Result], *arguments: object) -> Result:
    """Run a client that blocks, with a limit."""
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(client, *arguments)


async def ready(router: Running, count: int = 1) -> None:
    """Wait as SGLang's tests do, until so many workers are listed, and as slime does, until the router is healthy."""

    def wait() -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            listed = requests.get(f"{router.url}/workers", timeout=5).json()
            healthy = requests.get(f"{router.url}/health_generate", headers={"Authorization": "Bearer None"}, timeout=5)
            up = [worker for worker in listed["workers"] if worker["is_healthy"]]
            if listed.get("total", len(listed["workers"])) >= count and len(up) >= count and healthy.status_code == 200:
                return
            time.sleep(0.01)
        raise AssertionError("not ready in time")

    await in_thread(wait)


# slime


def slime_registers(router: str, worker: str, *, old_api: bool) -> None:
    if old_api:
        response = requests.post(f"{router}/add_worker?url={worker}", timeout=5)
    else:
        response = requests.post(f"{router}/workers", json={"url": worker, "worker_type": "regular"}, timeout=5)
    response.raise_for_status()


def slime_leaves(router: str, worker: str, version: str) -> None:
    if version == "0.2.1":
        requests.post(f"{router}/remove_worker?url={worker}", timeout=5).raise_for_status()
    elif version == "0.2.2":
        requests.delete(f"{router}/workers/{quote(worker, safe='')}", timeout=5).raise_for_status()
    else:
        listed = requests.get(f"{router}/workers", timeout=5).json()["workers"]
        (worker_id,) = [known["id"] for known in listed if known["url"] == worker]
        requests.delete(f"{router}/workers/{worker_id}", timeout=5).raise_for_status()


@pytest.mark.parametrize("version", ["0.2.1", "0.2.2", "0.3.2"])
async def test_an_engine_of_slime_registers_and_leaves(
    router: Running, start_worker: StartWorker, version: str
) -> None:
    worker = await start_worker(Engine())
    await in_thread(lambda: slime_registers(router.url, worker.url, old_api=version == "0.2.1"))
    await ready(router)
    await in_thread(slime_leaves, router.url, worker.url, version)
    assert await router.views() == []


async def test_slime_aborts_everything_on_the_workers_that_the_router_lists(
    router: Running, start_worker: StartWorker
) -> None:
    engines = [Engine(running=3), Engine()]
    workers = [await start_worker(engine) for engine in engines]
    for worker in workers:
        await router.add(worker)
    async with httpx.AsyncClient(timeout=5) as client:
        listed = (await client.get(f"{router.url}/workers")).raise_for_status().json()
        urls = [worker["url"] for worker in listed["workers"]]
        assert urls == [worker.url for worker in workers]
        for url in urls:
            (await client.post(f"{url}/abort_request", json={"abort_all": True})).raise_for_status()
        loads = (await client.get(f"{router.url}/v1/loads?include=core,disagg,queues")).raise_for_status().json()
    assert [engine.aborts for engine in engines] == [[{"abort_all": True}]] * 2
    assert sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads["loads"]) == 0


async def test_slime_prunes_a_dead_worker(router: Running, start_worker: StartWorker) -> None:
    good, dead = await start_worker(), await start_worker()
    for worker in (good, dead):
        await router.add(worker)
    await dead.die()
    async with httpx.AsyncClient(timeout=5) as client:
        for worker in (await client.get(f"{router.url}/workers")).json()["workers"]:
            try:
                (await client.get(f"{worker['url']}/health")).raise_for_status()
            except httpx.HTTPError:
                for status in (202, 404):
                    assert (await client.delete(f"{router.url}/workers/{worker['id']}")).status_code == status
    assert [view["url"] for view in await router.views()] == [good.url]


# Miles


class MilesAccepted(BaseModel):
    status: Literal["accepted"]
    worker_id: UUID
    url: str
    location: str


class MilesRemoved(BaseModel):
    status: Literal["accepted"]
    worker_id: str


class MilesWorker(BaseModel):
    id: str
    url: str
    is_healthy: bool
    job_status: None = None


def miles_until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def miles_registers(router: str, worker: str) -> str:
    with requests.Session() as session:
        response = session.post(f"{router}/workers", json={"url": worker, "worker_type": "regular"}, timeout=5)
        assert response.status_code == 202
        accepted = MilesAccepted.model_validate_json(response.text)
        assert accepted.url == worker and accepted.location == f"/workers/{accepted.worker_id}"

        def active() -> bool:
            seen = session.get(f"{router}{accepted.location}", timeout=5)
            assert seen.status_code == 200
            shown = MilesWorker.model_validate_json(seen.text)
            assert (shown.id, shown.url) == (str(accepted.worker_id), worker)
            return shown.is_healthy

        miles_until(active)
    return str(accepted.worker_id)


def miles_removes(router: str, worker_id: str) -> None:
    with requests.Session() as session:
        response = session.delete(f"{router}/workers/{worker_id}", timeout=5)
        assert response.status_code == 202
        assert MilesRemoved.model_validate_json(response.text).worker_id == worker_id
        miles_until(lambda: session.get(f"{router}/workers/{worker_id}", timeout=5).status_code == 404)
        assert session.delete(f"{router}/workers/{worker_id}", timeout=5).status_code == 404


async def test_an_engine_of_miles_registers_and_leaves(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(Engine())
    worker_id = await in_thread(miles_registers, router.url, worker.url)
    await in_thread(miles_removes, router.url, worker_id)
    assert await router.views() == []


async def test_miles_by_its_old_api_and_by_looking_for_the_url(router: Running, start_worker: StartWorker) -> None:
    first, second = await start_worker(Engine()), await start_worker(Engine())
    async with httpx.AsyncClient(timeout=5) as client:
        for worker in (first, second):
            (await client.post(f"{router.url}/add_worker?url={worker.url}")).raise_for_status()
        urls = (await client.get(f"{router.url}/list_workers")).json()["urls"]
        assert urls == [first.url, second.url]
        (await client.post(f"{router.url}/remove_worker?url={first.url}")).raise_for_status()
        for worker in (await client.get(f"{router.url}/workers")).json()["workers"]:
            (await client.delete(f"{router.url}/workers/{worker['id']}")).raise_for_status()
    assert await router.views() == []


# SGLang


async def test_sglangs_runtime_endpoint(router: Running, start_worker: StartWorker) -> None:
    """What sglang.lang's RuntimeEndpoint asks of a base URL."""
    engine = Engine()
    await router.add(await start_worker(engine))

    def client() -> None:
        assert requests.get(f"{router.url}/get_model_info", timeout=5).json()["model_path"] == "tiny"
        assert requests.get(f"{router.url}/server_info", timeout=5).json()["internal_states"] == [{}]
        assert requests.post(f"{router.url}/flush_cache", timeout=5).status_code == 200
        asked = {"text": "a", "sampling_params": {"max_new_tokens": 0}}
        assert requests.post(f"{router.url}/generate", json=asked, timeout=5).json()["text"] == "ok"
        assert requests.get(f"{router.url}/v1/models", timeout=5).json()["data"][0]["id"] == "tiny"

    await in_thread(client)
    assert engine.flushes == 1


async def test_the_gateway_of_sglangs_own_tests(router: Running, start_worker: StartWorker) -> None:
    """Start empty, add by API, list with status, load and type, find by url, remove by id."""
    worker = await start_worker(Engine())
    async with httpx.AsyncClient(timeout=5) as client:
        assert (await client.get(f"{router.url}/workers")).json()["workers"] == []
        added = await client.post(f"{router.url}/workers", json={"url": worker.url})
        assert added.is_success and added.json()["worker_id"]
        await ready(router)
        (shown,) = (await client.get(f"{router.url}/workers")).json()["workers"]
        assert (shown["is_healthy"], shown["load"], shown["worker_type"]) == (True, 0, "regular")
        assert shown["connection_mode"] == "http" and shown["priority"] == 0
        assert [model["id"] for model in (await client.get(f"{router.url}/v1/models")).json()["data"]] == ["tiny"]
        assert (await client.get(f"{router.url}/health")).status_code == 200
        assert (await client.get(f"{router.url}/get_loads")).json()["workers"][0]["load"] == 0
        assert (await client.delete(f"{router.url}/workers/{shown['id']}")).is_success


async def test_registering_again_is_no_error_for_any_of_them(router: Running, start_worker: StartWorker) -> None:
    worker: FakeWorker = await start_worker(Engine())
    for old_api in (False, True, False):
        await in_thread(lambda old=old_api: slime_registers(router.url, worker.url, old_api=old))
    await ready(router)
    assert len(await router.views()) == 1
