"""Loads an address: closed loops at full speed, many requests at once, streams, large bodies, idle connections.

Must cost less than what it measures: wrk where it is, and plain asyncio protocols.
"""

import asyncio
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from tests import tools

T = TypeVar("T")
CONNECT_AT_ONCE = 128
KEPT_BYTES = 65536
WRK_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local file = io.open(os.getenv("FURLONG_BENCH_BODY"), "rb")
wrk.body = file:read("*a")
file:close()
done = function(summary, latency)
  local e = summary.errors
  io.write(string.format("\\nDONE %d %d %d %d %d\\n", summary.requests, summary.duration,
    e.connect + e.read + e.write + e.status + e.timeout, latency:percentile(50), latency:percentile(99)))
end
"""


@dataclass(frozen=True)
class Rate:
    """What a closed loop came to."""

    num_requests: int
    seconds: float
    num_errors: int
    p50_us: float
    p99_us: float


@dataclass
class Call(asyncio.Protocol):
    """One connection with one request at a time; times what comes back."""

    status: int = 0
    started: float = 0.0
    first_byte_s: float = 0.0
    """From the request to the first byte of the answer's body."""
    total_s: float = 0.0
    num_reads: int = 0
    size_bytes: int = 0
    start_of_body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    complete: bool = False
    """Whether the answer came to its end, by its own framing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)
        self.done = asyncio.get_running_loop().create_future()

    def send(self, request: bytes) -> None:
        self.parser = httptools.HttpResponseParser(self)
        if self.done.done():
            self.done = asyncio.get_running_loop().create_future()
        self.complete, self.started = False, time.perf_counter()
        self.transport.write(request)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.size_bytes += len(body)
        if len(self.start_of_body) < KEPT_BYTES:
            self.start_of_body += body

    def on_message_complete(self) -> None:
        self.complete = self.status >= 200

    def data_received(self, data: bytes) -> None:
        before = self.size_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()
            return
        if self.size_bytes > before:
            self.num_reads += 1
            if not self.first_byte_s:
                self.first_byte_s = time.perf_counter() - self.started
        if self.complete:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.total_s = time.perf_counter() - self.started
            self.done.set_result(None)


@dataclass(frozen=True)
class Crowd:
    """Requests that were made at once."""

    calls: Sequence[Call]
    seconds: float
    outcomes: Counter[str]

    @property
    def num_failed(self) -> int:
        return self.outcomes.total() - self.outcomes["200"]


def run(work: Coroutine[Any, Any, T]) -> T:  # Any: what a coroutine is sent, which is nothing
    """On the loop that loads best."""
    return uvloop.run(work)


def body(marks: str = "", *, size_bytes: int = 1024, stream: bool = False, **more: object) -> bytes:
    """A generation of about so many bytes, with marks for the fake worker."""
    parameters = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 32}
    asked = {"text": marks, "sampling_params": parameters, "return_logprob": True, "stream": stream, **more}
    spare = max(0, size_bytes - len(json.dumps(asked)))
    asked["text"] = marks + (" token" * (spare // 6 + 1))[:spare]
    return json.dumps(asked).encode()


def request(content: bytes, *, target: str = "/generate", method: str = "POST", extra: str = "") -> bytes:
    """A request as bytes."""
    head = f"{method} {target} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{extra}"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def connect(url: str) -> Call:
    """A connection that has sent nothing yet."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return (await asyncio.get_running_loop().create_connection(Call, parts.hostname, parts.port))[1]


async def ask(url: str, message: bytes, *, timeout_s: float = 30.0) -> Call:
    """One request on a connection of its own; `complete` and `status` say how it ended. Raises OSError."""
    call = await connect(url)
    call.send(message)
    await asyncio.wait([call.done], timeout=timeout_s)
    call.transport.abort()
    return call


async def connect_many(url: str, num: int) -> list[Call]:
    """Connections; fewer than asked for where some are refused."""
    calls: list[Call] = []
    for start in range(0, num, CONNECT_AT_ONCE):
        size = min(CONNECT_AT_ONCE, num - start)
        got = await asyncio.gather(*(connect(url) for _ in range(size)), return_exceptions=True)
        calls += [one for one in got if isinstance(one, Call)]
    return calls


async def crowd(url: str, num: int, message: bytes, *, timeout_s: float = 60.0) -> Crowd:
    """So many connections, opened first, and then a request on each at once."""
    calls = await connect_many(url, num)
    started = time.perf_counter()
    for call in calls:
        call.send(message)
    await asyncio.wait([call.done for call in calls], timeout=timeout_s)
    seconds = time.perf_counter() - started
    outcomes = Counter({"refused": num - len(calls)})
    for call in calls:
        outcomes[str(call.status) if call.complete else "cut" if call.done.done() else "late"] += 1
        call.transport.abort()
    return Crowd(calls, seconds, +outcomes)


async def hold_open(url: str, num: int, message: bytes) -> tuple[list[Call], int]:
    """Connections that have each had an answer and stay open; and how many of them had it."""
    calls = await connect_many(url, num)
    for start in range(0, len(calls), CONNECT_AT_ONCE):
        some = calls[start : start + CONNECT_AT_ONCE]
        for call in some:
            call.send(message)
        await asyncio.wait([call.done for call in some], timeout=30.0)
    return calls, sum(call.complete and call.status == 200 for call in calls)


def closed_loop(url: str, content: bytes, *, concurrency: int, seconds: int) -> Rate:
    """So many connections, each asking again once it has its answer."""
    wrk = tools.find("wrk")
    return _by_wrk(wrk, url, content, concurrency, seconds) if wrk else _by_asyncio(url, content, concurrency, seconds)


def _by_wrk(wrk: tools.Tool, url: str, content: bytes, concurrency: int, seconds: int) -> Rate:
    with tempfile.TemporaryDirectory() as folder:
        script, sent = Path(folder, "ask.lua"), Path(folder, "body.json")
        script.write_text(WRK_SCRIPT)
        sent.write_bytes(content)
        flags = ["-t1", f"-c{concurrency}", f"-d{seconds}s", "--timeout", "20s", "-s", str(script)]
        done = subprocess.run(
            [*wrk.command, *flags, f"{url}/generate"],
            env={**wrk.environment, "FURLONG_BENCH_BODY": str(sent)},
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=True,
        )
    found = re.search(r"DONE (\d+) (\d+) (\d+) (\d+) (\d+)", done.stdout)
    assert found, done.stdout + done.stderr
    num, duration_us, errors, p50, p99 = map(int, found.groups())
    return Rate(num, duration_us / 1e6, errors, p50, p99)


def _by_asyncio(url: str, content: bytes, concurrency: int, seconds: int) -> Rate:
    """In a process of its own, so that this one's loop is free."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_loop_here, (url, content, concurrency, seconds, os.sched_getaffinity(0)))


def _loop_here(url: str, content: bytes, concurrency: int, seconds: int, cpus: set[int]) -> Rate:
    os.sched_setaffinity(0, cpus)
    latencies_s: list[float] = []
    errors = [0]

    async def one(until: float, message: bytes) -> None:
        call = await connect(url)
        while time.perf_counter() < until:
            call.send(message)
            await call.done
            if call.status != 200 or not call.complete:
                errors[0] += 1
                call = await connect(url)
            latencies_s.append(call.total_s)
        call.transport.abort()

    async def everyone() -> float:
        started, message = time.perf_counter(), request(content)
        await asyncio.gather(*(one(started + seconds, message) for _ in range(concurrency)))
        return time.perf_counter() - started

    took_s = run(everyone())
    cuts = statistics.quantiles(latencies_s, n=100)
    return Rate(len(latencies_s), took_s, errors[0], cuts[49] * 1e6, cuts[98] * 1e6)
