"""Tokens per second of the CPU engine, beside SGLang, a bare decoding loop and transformers, on the same model.

    python benchmarks/engine.py [--model-path DIR] [--sglang-python PATH --sglang-launcher PATH]

Without --model-path: a random model of 100,000 parameters, so that what an engine does besides arithmetic counts most.
SGLang is the one that tests/sglang_environment.py finds (`make sglang` makes it), unless another is named.

It starts and stops its own servers and alternates them round by round, since a shared machine's speed drifts. Only the
ratios of one run mean something. Every process has one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 300
CALL_TIMEOUT_S = 300
PROMPT_LENGTHS = (8, 40)


@dataclass(frozen=True)
class Load:
    """What one round asks for."""

    concurrency: int
    num_requests: int
    max_new_tokens: int
    vocab_size: int

    def prompts(self, seed: int) -> list[list[int]]:
        """Random prompts, other ones each round."""
        rnd = random.Random(seed)
        return [
            [rnd.randrange(min(self.vocab_size, 256)) for _ in range(rnd.randint(*PROMPT_LENGTHS))]
            for _ in range(self.num_requests)
        ]


class Server:
    """A server process that answers /generate."""

    def __init__(self, name: str, command: Sequence[str], port: int | None, port_file: Path | None) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long-lived as the server
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        self.port = self._await(port, port_file)

    def _await(self, port: int | None, port_file: Path | None) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if port_file is not None and port_file.exists():
                return int(port_file.read_text())
            if port is not None and _answers(port):
                return port
            time.sleep(0.2)
        self._log.seek(0)
        self.stop()
        raise SystemExit(f"{self.name} did not start:\n{self._log.read()[-3000:].decode(errors='replace')}")

    def stop(self) -> None:
        """End the process and those that it started."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(15)


def _answers(port: int) -> bool:
    import http.client

    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


async def _round(port: int, load: Load, seed: int) -> float:
    import aiohttp

    limit = asyncio.Semaphore(load.concurrency)
    params = {"temperature": 1.0, "max_new_tokens": load.max_new_tokens, "ignore_eos": True}
    timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: list[int]) -> int:
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            async with limit, session.post(f"http://127.0.0.1:{port}/generate", json=body) as response:
                answer = json.loads(await response.read())
                assert len(answer["output_ids"]) == load.max_new_tokens, answer
                return len(answer["output_ids"])

        started = time.perf_counter()
        counts = await asyncio.gather(*(one(prompt) for prompt in load.prompts(seed)))
        return sum(counts) / (time.perf_counter() - started)


def engine_server(model: Path, folder: Path) -> Server:
    """Start the CPU engine."""
    port_file = folder / "port"
    command = [sys.executable, "-m", "services.rollout.engine", "--model-path", str(model), "--dtype", "float32"]
    return Server("engine", [*command, "--port", "0", "--port-file", str(port_file)], None, port_file)


def sglang_server(model: Path, python: str, launcher: str) -> Server:
    """Start SGLang on a free port. launcher: empty for its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = [launcher] if launcher else ["-m", "sglang.launch_server"]
    command = [python, *start, "--model-path", str(model), "--device", "cpu", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-total-tokens", "16384"]
    return Server("sglang", [*command, "--max-running-requests", "64"], port, None)


def bare_loop(model_path: Path) -> Callable[[Load, int], float]:
    """A decoding loop without scheduler, HTTP or log-probs: a plain batch in a static cache, sampled, nothing else."""
    import torch

    from benchmarks.bare_decode import BareModel

    torch.set_num_threads(1)
    model = BareModel(model_path)

    def run(load: Load, seed: int) -> float:
        prompts = load.prompts(seed)
        started = time.perf_counter()
        for at in range(0, len(prompts), load.concurrency):
            model.generate(prompts[at : at + load.concurrency], load.max_new_tokens)
        return len(prompts) * load.max_new_tokens / (time.perf_counter() - started)

    return run


def transformers_generate(model_path: Path) -> Callable[[Load, int], float]:
    """transformers' own generate on the same batches."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def run(load: Load, seed: int) -> float:
        prompts = load.prompts(seed)[: load.concurrency]
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        started = time.perf_counter()
        model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=load.max_new_tokens)
        return len(prompts) * load.max_new_tokens / (time.perf_counter() - started)

    return run


def measure(contestants: dict[str, Callable[[Load, int], float]], load: Load, rounds: int) -> dict[str, list[float]]:
    """Run each contestant once a round, after one warm-up, in turn."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            rate = run(load, number)
            if number:
                rates[name].append(rate)
    return rates


def report(rates: dict[str, list[float]], load: Load) -> None:
    """Print medians and the ratios that matter."""
    print(
        f"{load.concurrency} at once, {load.num_requests} requests of {load.max_new_tokens} tokens, 1 thread, float32"
    )
    for name, values in rates.items():
        low, high = min(values), max(values)
        print(f"{name:13s} {statistics.median(values):9,.0f} tokens/s  ({low:,.0f}-{high:,.0f}, {len(values)} rounds)")
    for other in ("sglang", "bare loop", "transformers"):
        if other in rates:
            ratios = [ours / theirs for ours, theirs in zip(rates["engine"], rates[other], strict=True)]
            print(f"engine / {other}: {statistics.median(ratios):.2f}  ({min(ratios):.2f}-{max(ratios):.2f})")


def main() -> None:
    """Read the flags, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sys.path.insert(0, str(REPOSITORY))
    from tests.sglang_environment import LAUNCHER, MISSING, find_sglang

    found = find_sglang()
    parser.add_argument("--model-path", type=Path, help="checkpoint folder")
    parser.add_argument("--sglang-python", default=found.python if found else "", help="of an environment with SGLang")
    parser.add_argument(
        "--sglang-launcher",
        default=found.launcher if found else str(LAUNCHER),
        help="script that takes the flags of sglang.launch_server; empty: that itself",
    )
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-requests", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model_path or _random_model(Path(folder, "model"))
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        load = Load(args.concurrency, args.num_requests, args.max_new_tokens, vocab_size)
        try:
            servers.append(engine_server(model, Path(folder)))
            if args.sglang_python:
                servers.append(sglang_server(model, args.sglang_python, args.sglang_launcher))
            else:
                print(f"SGLang is left out: {MISSING}.")
            report(measure(_contestants(servers, model), load, args.rounds), load)
        finally:
            for server in servers:
                server.stop()


def _random_model(folder: Path) -> Path:
    from tests.rollout.engine.tiny_model import make_checkpoint

    return make_checkpoint(folder)


def _contestants(servers: Sequence[Server], model_path: Path) -> dict[str, Callable[[Load, int], float]]:
    contestants: dict[str, Callable[[Load, int], float]] = {
        server.name: lambda load, seed, port=server.port: asyncio.run(_round(port, load, seed)) for server in servers
    }
    contestants["bare loop"] = bare_loop(model_path)
    contestants["transformers"] = transformers_generate(model_path)
    return contestants


if __name__ == "__main__":
    main()
