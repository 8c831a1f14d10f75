"""The paths that mean all engines, with SGLang itself registered twice: under two names of this machine's loopback."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.conftest import Running, StartRouter
from tests.router.control.calling import call
from tests.router.raw_client import exchange, get
from tests.router.test_real_sglang import Sglang, json_post, pytestmark, sglang
from tests.router.waiting import eventually

__all__ = ["pytestmark", "sglang"]  # used by pytest

TOKEN = "t0ken-of-the-router"


@pytest.fixture
async def router(start_router: StartRouter, sglang: Sglang, tmp_path: Path) -> Running:
    (tmp_path / "token").write_text(TOKEN)
    running = await start_router(token_file=str(tmp_path / "token"), health_timeout_s=10.0)
    running.http.headers["Authorization"] = f"Bearer {TOKEN}"
    for host in ("127.0.0.1", "localhost"):
        assert (await call(running, "POST", "/workers", {"url": f"http://{host}:{sglang.port}"}))[0] == 202
    await eventually(lambda: running.listening.router.workers.num_ready() == 2, "both names are ready", timeout_s=30)
    return running


async def test_what_only_looks(router: Running, sglang: Sglang) -> None:
    urls = [f"http://127.0.0.1:{sglang.port}", f"http://localhost:{sglang.port}"]
    assert [model["id"] for model in (await call(router, "GET", "/v1/models"))[1]["data"]] == ["tiny"]
    loads = (await call(router, "GET", "/v1/loads?include=core"))[1]
    assert [load["worker"] for load in loads["loads"]] == urls and loads["num_accelerators"] >= 1
    assert all(load["num_running_reqs"] == 0 for load in loads["loads"])
    answer = await exchange(router.port, get(b"/v1/loads?format=prometheus"))
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    assert [sample.labels["worker"] for sample in families["sglang_num_running_reqs"].samples] == urls
    assert [load["load"] for load in (await call(router, "GET", "/get_loads"))[1]["workers"]] == [0, 0]


async def test_flush_pause_and_abort(router: Running, sglang: Sglang) -> None:
    assert (await call(router, "POST", "/flush_cache"))[0] == 200
    long = {"text": "a", "rid": "x1", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    generation = asyncio.create_task(exchange(router.port, json_post("/generate", long), timeout_s=60))
    status, said = 200, {}
    async with asyncio.timeout(20):
        while status == 200:  # until it runs
            status, said = await call(router, "GET", "/flush_cache")
    assert status == 400 and said["error"]["type"] == "flush_failed" and "Flush cache failed" in said["failed"][0][1]
    assert (await call(router, "POST", "/abort_request", {"rid": "x1"}))[0] == 200
    assert b'"type":"abort"' in (await generation).body
    header = {"x-furlong-worker": f"http://127.0.0.1:{sglang.port}"}
    for path, body in (("/pause_generation", {"mode": "abort"}), ("/continue_generation", {})):
        status, said = await call(router, "POST", path, body, **header)
        assert status == 200 and said["status"] == "ok"
    assert (await call(router, "POST", "/abort_request", {"abort_all": True}))[0] == 200
