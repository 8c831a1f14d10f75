"""A router that is started again, without its servers: who is there, and what of it is proven."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from furlong.config import ConfigError
from services.router.router import Router
from services.router.workers.worker import State
from tests.router.workers.clock import SETTINGS

HTTP = "http://127.0.0.1:9"
GRPC = "http://127.0.0.2:9"
FLAG = "http://127.0.0.3:9"


@asynccontextmanager
async def running(path: Path, **changes: object) -> AsyncGenerator[Router]:
    router = Router(replace(SETTINGS, **changes), state_file=path)  # type: ignore[arg-type]
    router.start()
    try:
        yield router
    finally:
        await router.close()


async def test_workers_are_there_again_as_they_were_registered(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    async with running(path) as router:
        before = router.add(HTTP, admit=True, labels={"pool": "eval"}, priority=7, api_key="k", worker_type="regular")
    async with running(path) as router:
        [after] = router.workers.all()
    assert after is not before and after.worker_id == before.worker_id
    assert (after.name, dict(after.labels), after.priority, after.api_key) == (HTTP, {"pool": "eval"}, 7, "k")


async def test_nothing_is_proven_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    async with running(path) as router:
        for url, admit in ((HTTP, True), (GRPC, False)):
            router.workers.probe_answered(router.add(url, admit=admit))
        confirmed = router.workers.registered(GRPC)
        assert confirmed is not None
        router.workers.set_state(confirmed, admit=True, policy_version=7)
        assert router.workers.num_ready() == 2
    async with running(path) as router:
        http, grpc = router.workers.all()
        assert [http.state, grpc.state, grpc.policy_version] == [State.JOINING, State.JOINING, None]
        router.workers.probe_answered(http)
        router.workers.probe_answered(grpc)
        assert [http.state, grpc.state] == [State.READY, State.JOINING], "a probe does not say which weights it holds"
        router.workers.set_state(grpc, admit=True, policy_version=8)
        assert grpc.state is State.READY


async def test_a_pause_outlives_a_restart_and_a_removed_worker_does_not(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    async with running(path) as router:
        router.workers.set_state(router.add(HTTP, admit=True), admit=False, policy_version=None)
        router.add(GRPC, admit=False)
        assert router.remove(GRPC)
    async with running(path) as router:
        [paused] = router.workers.all()
        router.workers.probe_answered(paused)
        assert paused.name == HTTP and router.workers.num_ready() == 0


async def test_flags_say_who_is_there_by_flags(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    async with running(path, worker_urls=(FLAG, GRPC + "/")) as router:
        router.add(HTTP, admit=True)
        assert router.remove(FLAG)
        first = router.workers.registered(GRPC)
    async with running(path, worker_urls=(FLAG, GRPC)) as router:
        assert {w.name for w in router.workers.all()} == {FLAG, GRPC, HTTP}
        again = router.workers.registered(GRPC)
        assert first is not None and again is not None and first.worker_id == again.worker_id
    async with running(path) as router:
        assert [w.name for w in router.workers.all()] == [HTTP]


async def test_a_bad_worker_of_the_flags_ends_the_start_and_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    async with running(path) as router:
        router.add(HTTP, admit=True)
    content = path.read_bytes()
    with pytest.raises(ConfigError, match=r"router_worker_urls = 'file:///x'.*must begin with http"):
        async with running(path, worker_urls=(FLAG, "file:///x")):
            pass
    assert path.read_bytes() == content


async def test_who_is_no_longer_allowed_does_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    async with running(path) as router:
        router.add(HTTP, admit=True)
        router.add(GRPC, admit=True)
    async with running(path, worker_allow=("127.0.0.2",)) as router:
        assert [w.name for w in router.workers.all()] == [GRPC]


async def test_without_versions_nobody_waits_for_one(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    async with running(path, require_policy_version=True) as router:
        router.add(GRPC, admit=False)
    async with running(path, require_policy_version=False) as router:
        for worker in (*router.workers.all(), router.add(HTTP, admit=False)):
            router.workers.probe_answered(worker)
            assert worker.state is State.READY
