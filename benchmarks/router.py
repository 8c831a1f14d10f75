"""What the router costs: requests/s and latency through it, beside the same requests straight to the worker.

    python benchmarks/router.py [--seconds 3] [--concurrency 1 16 64]

Worker, router and client are processes of this machine, so that the ratios carry over to other machines and the figures
do not. The worker answers at once; a real one takes seconds, next to which all of this vanishes.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import psutil
import uvloop

from furlong import addresses
from furlong.config import RunConfig
from furlong.rundir import RunDir

ANSWER_BYTES = 1800
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1800\r\n\r\n" + b"x" * ANSWER_BYTES
BODY = b"y" * 1000
REQUEST = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + BODY
START_S = 30.0


@dataclass(frozen=True)
class Result:
    """One measurement."""

    requests_per_s: float
    p50_us: float
    p99_us: float
    cpu_s_per_10k: float


class _Worker(asyncio.Protocol):
    """Answers each request at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._pending = b""

    def data_received(self, data: bytes) -> None:
        self._pending += data
        if self._pending.startswith(b"GET"):
            self._pending = b""
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        _, found, body = self._pending.partition(b"\r\n\r\n")
        if found and len(body) >= len(BODY):
            self._pending = b""
            self._transport.write(ANSWER)


def _run_worker(tell: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Worker, "127.0.0.1", 0, backlog=4096)
        tell.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


def _run_router(run_dir: str) -> None:
    from services.router.main import main

    config = RunConfig.model_validate({"run": {"run_dir": run_dir}})
    main(config, rank=0, foreground=False)


class _Client(asyncio.Protocol):
    """Asks again as soon as it has its answer, until its time is over. Cheap, so that it measures the other side."""

    def __init__(self, until: float, latencies_s: list[float]) -> None:
        self._until = until
        self._latencies_s = latencies_s
        self._pending = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._pending += data
        _, found, body = self._pending.partition(b"\r\n\r\n")
        if not found or len(body) < ANSWER_BYTES:
            return
        if not self._pending.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(repr(self._pending[:200])))
            return
        self._latencies_s.append(time.perf_counter() - self._started)
        self._pending = b""
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"connection lost: {exc}"))

    def _ask(self) -> None:
        self._started = time.perf_counter()
        if self._started < self._until:
            self._transport.write(REQUEST)
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()


async def _client(port: int, until: float, latencies_s: list[float]) -> None:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: _Client(until, latencies_s), "127.0.0.1", port)
    await client.done


async def _measure(port: int, *, concurrency: int, seconds: float, process: psutil.Process | None) -> Result:
    latencies_s: list[float] = []
    cpu_before_s = sum(process.cpu_times()[:2]) if process else 0.0
    started = time.perf_counter()
    await asyncio.gather(*(_client(port, started + seconds, latencies_s) for _ in range(concurrency)))
    cpu_s = sum(process.cpu_times()[:2]) - cpu_before_s if process else 0.0
    cuts = statistics.quantiles(latencies_s, n=100)
    count = len(latencies_s)
    return Result(count / (time.perf_counter() - started), cuts[49] * 1e6, cuts[98] * 1e6, cpu_s * 10_000 / count)


@contextlib.contextmanager
def _running() -> Generator[tuple[int, int, psutil.Process]]:
    """Ports of a worker and of a router in front of it, and the router's process."""
    context = multiprocessing.get_context("spawn")
    hear, tell = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        worker = context.Process(target=_run_worker, args=(tell,), daemon=True)
        router = context.Process(target=_run_router, args=(folder,), daemon=True)
        worker.start()
        router.start()
        try:
            worker_port = hear.recv()
            entry = addresses.wait_for(RunDir(Path(folder)), "router", timeout_s=START_S)
            assert entry.http and router.pid
            body = json.dumps({"url": f"http://127.0.0.1:{worker_port}"}).encode()
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            opener.open(urllib.request.Request(f"{entry.http}/workers", body), timeout=START_S).close()
            yield worker_port, int(entry.http.rsplit(":", 1)[1]), psutil.Process(router.pid)
        finally:
            for process in (router, worker):
                process.terminate()
                process.join(START_S)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each measurement takes")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64], help="requests at once")
    args = parser.parse_args()
    with _running() as (worker_port, router_port, process):
        columns = ("at once", "direct/s", "router/s", "ratio", "+p50 us", "+p99 us", "CPU s/10k")
        print(" ".join(f"{name:>9}" for name in columns))
        for concurrency in args.concurrency:
            limits = {"concurrency": concurrency, "seconds": args.seconds}
            uvloop.run(_measure(router_port, concurrency=concurrency, seconds=0.3, process=None))
            direct = uvloop.run(_measure(worker_port, **limits, process=None))
            routed = uvloop.run(_measure(router_port, **limits, process=process))
            print(
                f"{concurrency:9d} {direct.requests_per_s:9.0f} {routed.requests_per_s:9.0f} "
                f"{routed.requests_per_s / direct.requests_per_s:9.2f} {routed.p50_us - direct.p50_us:9.0f} "
                f"{routed.p99_us - direct.p99_us:9.0f} {routed.cpu_s_per_10k:9.2f}"
            )
        print(f"router RSS {process.memory_info().rss / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
