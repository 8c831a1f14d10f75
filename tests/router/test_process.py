"""The router as a process of its own: start, addresses, memory, bodies, drain."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiohttp
import psutil
import pytest
import structlog.testing

from furlong import addresses, rpc
from furlong.config import RunConfig, to_toml
from furlong.process import ExitCode, StopSignal
from furlong.rundir import RunDir
from furlong.service import ServiceContext
from furlong.telemetry import Telemetry
from services.router import main
from services.router.control.grpc_service import NAME
from services.router.processes.handdown import Logging
from tests.router.conftest import StartWorker
from tests.router.fake_worker import FakeWorker, Seen
from tests.router.raw_client import exchange, get, post
from tests.router.waiting import eventually

START_S = 30.0
MIB = 1024 * 1024
PROGRAM = textwrap.dedent("""
    import sys
    from furlong.config import RunConfig
    from services.router.main import main
    config = RunConfig.model_validate_json(sys.argv[1])
    code = main(config, rank=0, foreground=False)
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    sys.exit(code)
""")


@dataclass
class Process:
    """A running router process."""

    popen: subprocess.Popen[bytes]
    run_dir: RunDir
    url: str = ""
    grpc: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def rss_bytes(self) -> int:
        return psutil.Process(self.popen.pid).memory_info().rss

    async def ended(self) -> int:
        return await asyncio.to_thread(self.popen.wait, 20)

    async def register(self, worker: FakeWorker) -> None:
        call = aiohttp.ClientSession()
        async with call as http, http.post(f"{self.url}/workers", json={"url": worker.url}) as answer:
            assert answer.status == 202
        async with asyncio.timeout(10):
            while (await exchange(self.port, get(b"/readyz"))).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


Spawn = Callable[..., Process]


@pytest.fixture
async def spawn(tmp_path: Path) -> AsyncIterator[Spawn]:
    with contextlib.ExitStack() as stack:

        def start(*, host: str = "127.0.0.1", drain_budget_s: float = 5.0, **router: object) -> Process:
            config = RunConfig.model_validate(
                {
                    "run": {"run_dir": str(tmp_path), "host": host, "drain_budget_s": drain_budget_s},
                    "router": {"router_health_interval_s": 0.05, **router},
                }
            )
            command = [sys.executable, "-c", PROGRAM, config.model_dump_json()]
            popen = stack.enter_context(
                subprocess.Popen(
                    command, stderr=subprocess.PIPE, env={**os.environ, "http_proxy": "http://127.0.0.1:9"}
                )
            )
            stack.callback(popen.kill)
            return Process(popen, RunDir(tmp_path))

        yield start


async def started(process: Process) -> Process:
    entry = await asyncio.to_thread(addresses.wait_for, process.run_dir, "router", timeout_s=START_S)
    assert entry.http and entry.grpc
    process.url, process.grpc = entry.http, entry.grpc
    return process


async def test_start_publish_serve_and_end(spawn: Spawn, start_worker: StartWorker) -> None:
    process = await started(spawn())
    await asyncio.to_thread(rpc.wait_serving, process.grpc, NAME, timeout_s=START_S)
    await process.register(await start_worker())
    assert (await exchange(process.port, post(b"/generate"))).status == 200
    process.popen.send_signal(signal.SIGTERM)
    assert await process.ended() == ExitCode.DRAINED
    assert addresses.read_addresses(process.run_dir) == {}


async def test_a_router_that_was_killed_knows_its_workers_again(spawn: Spawn, start_worker: StartWorker) -> None:
    first, worker = await started(spawn()), await start_worker()
    await first.register(worker)
    state = first.run_dir.router_state
    await eventually(lambda: state.exists() and worker.url in state.read_text(), "the worker is written down")
    first.popen.kill()
    await first.ended()
    second = await started(spawn())
    async with asyncio.timeout(10):
        while (await exchange(second.port, get(b"/readyz"))).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (await exchange(second.port, post(b"/generate"))).status == 200


async def test_a_taken_port_ends_the_process_with_its_name(spawn: Spawn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = spawn(router_port=port)
        assert await process.ended() == ExitCode.BAD_CONFIG
        assert process.popen.stderr is not None
        assert f"127.0.0.1:{port}" in process.popen.stderr.read().decode()


async def test_ipv6(spawn: Spawn, start_worker: StartWorker) -> None:
    process = await started(spawn(host="::1"))
    assert process.url.startswith("http://[::1]:") and process.grpc.startswith("[::1]:")
    async with aiohttp.ClientSession() as http, http.get(f"{process.url}/healthz") as answer:
        assert answer.status == 200


async def test_a_request_in_flight_is_finished_before_the_end(spawn: Spawn, start_worker: StartWorker) -> None:
    go = asyncio.Event()

    async def slow(seen: Seen) -> None:
        await go.wait()
        await seen.answer(b"done")

    process, worker = await started(spawn()), await start_worker(slow)
    await process.register(worker)
    call = asyncio.create_task(exchange(process.port, post(b"/generate")))
    await worker.arrived()
    process.popen.send_signal(signal.SIGTERM)

    def refuses() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", process.port)) != 0

    await eventually(refuses, "nothing new is accepted")
    go.set()
    assert (await call).body == b"done"
    assert await process.ended() == ExitCode.DRAINED


async def test_what_does_not_end_in_time_is_told(spawn: Spawn, start_worker: StartWorker) -> None:
    async def hang(seen: Seen) -> None:
        await asyncio.Event().wait()

    process, worker = await started(spawn(drain_budget_s=2.0)), await start_worker(hang)
    await process.register(worker)
    call = asyncio.create_task(exchange(process.port, post(b"/generate")))
    await worker.arrived()
    process.popen.send_signal(signal.SIGTERM)
    answer = await call
    assert answer.status == 503 and b"stopping" in answer.body
    assert await process.ended() == ExitCode.DRAINED


@pytest.mark.slow
async def test_memory_stays_small_whatever_the_bodies(spawn: Spawn, start_worker: StartWorker) -> None:
    """40 MB both ways, eight at a time."""
    size = 40_000_000
    block = bytes(range(256)) * 4096

    async def swallow_and_flood(seen: Seen) -> None:
        left = size
        while left:
            left -= len(await seen.reader.readexactly(min(left, len(block))))
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for start in range(0, size, len(block)):
            await seen.send(block[: min(len(block), size - start)])

    process, worker = await started(spawn()), await start_worker(swallow_and_flood)
    worker.read_bodies = False
    await process.register(worker)
    idle_bytes = process.rss_bytes
    peak_bytes = idle_bytes
    body = block * (size // len(block)) + block[: size % len(block)]

    async def ask(http: aiohttp.ClientSession) -> None:
        nonlocal peak_bytes
        received = 0
        async with http.post(f"{process.url}/generate", data=body) as answer:
            assert answer.status == 200
            async for piece in answer.content.iter_any():
                received += len(piece)
                peak_bytes = max(peak_bytes, process.rss_bytes)
        assert received == size

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(ask(http) for _ in range(8)))
    print(f"idle {idle_bytes / MIB:.0f} MiB, peak {peak_bytes / MIB:.0f} MiB")
    assert idle_bytes < 150 * MIB and peak_bytes < 150 * MIB


def test_the_config_round_trips_the_routers_fields() -> None:
    config = RunConfig.model_validate({"router": {"router_worker_allow": ["10.0.0.0/8"], "router_max_queued": 7}})
    assert "router_max_queued = 7" in to_toml(config)


async def test_a_router_whose_address_cannot_be_written_serves_and_writes_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path).create()
    context = ServiceContext(RunConfig(), run_dir, "router", cast(Telemetry, None), StopSignal())
    publish = addresses.publish
    monkeypatch.setattr(main, "PUBLISH_AGAIN_S", 0.05)
    monkeypatch.setattr(addresses, "publish", full_disk)
    with structlog.testing.capture_logs() as logs:
        async with main._serve(context, logging=Logging("", foreground=False, ships=False), grpc_port=None):
            (http,) = [entry["http"] for entry in logs if entry["event"] == "router_listening"]
            assert (await exchange(int(http.rsplit(":", 1)[1]), get(b"/healthz"))).status == 200
            monkeypatch.setattr(addresses, "publish", publish)
            await eventually(lambda: addresses.find(run_dir, "router") is not None, "it is published")
    assert "address_not_published" in [entry["event"] for entry in logs]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
