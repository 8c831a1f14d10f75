"""A router of no run before two real CPU engines, one of which dies."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from furlong.process import ExitCode
from tests.cli.started_alone import Alone
from tests.metrics.running import until
from tests.system.real_runs import ROOT

NUM_ENGINES = 2


class CpuEngine:
    """A CPU engine, as somebody starts it by hand."""

    def __init__(self, folder: Path, number: int) -> None:
        port_file = folder / f"port-{number}"
        command = [sys.executable, "-m", "services.rollout.engine", "--model-path", "examples/arithmetic/base"]
        command += ["--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file), "--num-threads", "1"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd=ROOT
        )
        until(lambda: port_file.exists() and port_file.read_text().strip(), "the engine listens", limit_s=90.0)
        self.url = f"http://127.0.0.1:{port_file.read_text().strip()}"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[CpuEngine]]:
    folder = tmp_path_factory.mktemp("engines")
    started = [CpuEngine(folder, number) for number in range(NUM_ENGINES)]
    yield started
    for engine in started:
        engine.process.kill()
        engine.process.wait(10)


def ask(url: str, body: object = None, method: str = "") -> Any:  # Any: JSON
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method or None)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def generate(url: str, number: int) -> str:
    params = {"max_new_tokens": 4, "temperature": 0}
    return ask(f"{url}/generate", {"text": f"{number}+{number}=", "sampling_params": params})["text"]


@pytest.mark.slow
def test_two_engines_one_of_which_dies(tmp_path: Path, engines: list[CpuEngine]) -> None:
    flags = ["--worker-urls", engines[0].url, "--health-check-interval-secs", "1", "--policy", "round_robin"]
    router = Alone(tmp_path / "kept", *flags, service="router")
    try:
        ask(f"{router.http}/workers", {"url": engines[1].url})

        def workers() -> list[dict[str, Any]]:
            return ask(f"{router.http}/workers")["workers"]

        until(lambda: [worker["state"] for worker in workers()] == ["READY"] * 2, "both are ready", limit_s=60.0)
        direct = [generate(engines[0].url, number) for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda number: generate(router.http, number), range(8))) == direct
        assert min(worker["num_requests"] for worker in workers()) >= 3
        engines[1].process.kill()
        engines[1].process.wait(10)
        until(lambda: [w["state"] for w in workers()].count("READY") == 1, "the dead one is out", limit_s=30.0)
        assert [generate(router.http, number) for number in range(8)] == direct
        assert router.end() == ExitCode.DRAINED
        router = Alone(tmp_path / "kept", *flags, service="router")
        until(lambda: [w["state"] for w in workers()].count("READY") == 1, "it is known after a restart", limit_s=30.0)
        assert len(workers()) == 2
        assert [generate(router.http, number) for number in range(8)] == direct
    finally:
        router.end()
