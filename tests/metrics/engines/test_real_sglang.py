"""The lines and the endpoint of the real SGLang, where tests/sglang_environment.py finds it, become rows."""

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.metrics.running import MetricsProcess, until
from tests.rollout.engine.tiny_model import make_checkpoint
from tests.sglang_environment import MISSING, find_sglang

SGLANG = find_sglang()
START_LIMIT_S = 300.0
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(2 * START_LIMIT_S),
    pytest.mark.skipif(SGLANG is None, reason=MISSING),
]


def ask(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return answer.read()


def answers(url: str) -> bool:
    try:
        return bool(ask(url))
    except OSError:
        return False


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A running SGLang: its URL, and the file that it prints into."""
    assert SGLANG is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = make_checkpoint(tmp_path / "checkpoint", seed=1, kind="qwen3")
    start = [SGLANG.launcher] if SGLANG.launcher else ["-m", "sglang.launch_server"]
    options = f"--device cpu --dtype float32 --host 127.0.0.1 --port {port} --max-total-tokens 4096 --enable-metrics"
    command = [SGLANG.python, *start, "--model-path", str(model), *options.split(), "--decode-log-interval", "4"]
    log = tmp_path / "logs" / "engine-0.out"
    log.parent.mkdir()
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or answers(f"{url}/model_info"), "SGLang", limit_s=START_LIMIT_S)
        assert process.poll() is None, log.read_text()[-4000:]
        yield url, log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def test_lines_and_endpoint_of_sglang_say_the_same(
    engine: tuple[str, Path], make: Callable[..., MetricsProcess]
) -> None:
    url, log = engine
    service = make(tail=[str(log)], scrape=[f"scraped={url}"], scrape_interval_s=1.0).start()
    until(lambda: any(e.num_readings >= 2 for e in service.status().endpoints), "two readings of the endpoint")
    prompts = [f"{number} and more" for number in range(6)]
    ask(f"{url}/generate", {"text": prompts, "sampling_params": {"max_new_tokens": 48, "ignore_eos": True}})

    def total(name: str) -> float:
        newest = {row["step"]: row["values"] for row in service.rows()}  # a row may be amended
        return sum(values.get(f"engine/engine-0/{name}", 0.0) for values in newest.values())

    def printed() -> int:
        return sum(int(found) for found in re.findall(r"#new-seq: (\d+)", log.read_text()))

    assert printed() >= 6  # it warms up with one of its own
    until(lambda: total("new_seqs") == printed() and total("num_decode_batches") >= 11, "all batches in rows")
    both = {"engine/engine-0/gen_throughput", "engine/scraped/gen_throughput"}
    until(lambda: both <= {name for row in service.rows() for name in row["values"]}, "the throughput as each says it")
    until(lambda: any(row["values"].get("engine/scraped/queue_time_seconds_mean") for row in service.rows()), "a mean")
    assert service.status().files[0].num_invalid == 0
