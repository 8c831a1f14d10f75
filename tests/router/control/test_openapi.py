"""The control surface against its own OpenAPI, by Schemathesis: what it declares is so, and nothing is a 500."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.control.calling import call
from tests.router.control.test_everyone import answers

TOKEN = "t0ken-of-the-router"
LIMIT_S = 100.0
ANSWERS = {
    "/v1/models": {"object": "list", "data": [{"id": "a", "object": "model"}]},
    "/v1/loads": {"timestamp": "t", "loads": [{"dp_rank": 0, "num_running_reqs": 1}]},
    "/metrics": "# TYPE a gauge\na 1\n",
    "/abort_request": {},
    "/flush_cache": {},
}


async def run_schemathesis(router: Running, worker_port: int, folder: Path, *flags: str) -> tuple[int, str]:
    """Its exit code and what it says."""
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tests.router.control.schemathesis_hooks",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "WORKER_PORT": str(worker_port),
        "NO_COLOR": "1",
    }
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{router.url}/router/openapi.json", "--checks=all"]
    process = await asyncio.create_subprocess_exec(
        *command, "--seed=1", *flags, stdout=-1, stderr=asyncio.subprocess.STDOUT, env=environment, cwd=folder
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, said.decode()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("guarded", [False, True])
async def test_the_control_surface_is_as_it_declares(
    start_router: StartRouter, start_worker: StartWorker, tmp_path: Path, *, guarded: bool
) -> None:
    changes: dict[str, object] = {"health_interval_s": 2.0, "max_workers": 64}
    flags: list[str] = ["--max-examples=30"]
    if guarded:
        (tmp_path / "token").write_text(TOKEN)
        changes["token_file"] = str(tmp_path / "token")
        flags.append(f"--header=Authorization: Bearer {TOKEN}")
    router = await start_router(**changes)
    worker = await start_worker(answers(ANSWERS), host="0.0.0.0")
    worker.host = "127.0.0.1"
    router.listening.router.add(worker.url, admit=True)
    code, said = await run_schemathesis(router, worker.port, tmp_path, *flags)
    assert code == 0, said


async def test_openapi_names_every_path_and_no_error_of_another_shape(router: Running) -> None:
    said = (await call(router, "GET", "/router/openapi.json"))[1]
    assert {"/workers", "/workers/{name}", "/add_worker", "/flush_cache", "/v1/models", "/readyz"} <= set(said["paths"])
    operations = [operation for path in said["paths"].values() for operation in path.values()]
    assert not any("422" in operation["responses"] for operation in operations)
    errors = {
        content["schema"]["$ref"]
        for operation in operations
        for status, response in operation["responses"].items()
        if status >= "4"
        for content in response["content"].values()
    }
    assert errors == {"#/components/schemas/ErrorBody"}
