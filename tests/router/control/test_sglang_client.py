"""SGLang's own client of a base URL, the installed one, against a router with one engine that answers like SGLang."""

import asyncio

import pytest

from tests.router.conftest import Running, StartWorker
from tests.router.control.engine import Engine
from tests.sglang_environment import find_sglang

pytestmark = pytest.mark.sglang

LIMIT_S = 100.0
CLIENT = """
import runpy, sys
if sys.argv[2]:  # what makes SGLang importable on this machine
    runpy.run_path(sys.argv[2])
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
endpoint = RuntimeEndpoint(sys.argv[1])
assert endpoint.get_model_name() == "tiny"
assert endpoint.get_server_info()["version"] == "0.5.23"
endpoint.flush_cache()
endpoint.cache_prefix("a")
print("done")
"""


@pytest.mark.timeout(LIMIT_S + 20)
async def test_the_installed_runtime_endpoint(router: Running, start_worker: StartWorker) -> None:
    environment = find_sglang()
    assert environment is not None, "there is no SGLang here: `make sglang` makes .venv-sglang"
    engine = Engine()
    await router.add(await start_worker(engine))
    process = await asyncio.create_subprocess_exec(
        environment.python, "-c", CLIENT, router.url, environment.launcher, stdout=-1, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0 and said.decode().endswith("done\n"), said.decode()
    assert engine.flushes == 1
