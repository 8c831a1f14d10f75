"""Fifty engines join, die, hang, come back and are removed at random under 200 concurrent requests; weights change.

Each request is answered once, rightly or with a truthful error; no generation runs twice; no stale weights answer; the
router's counters end at zero, and its memory and open files stay bounded. FURLONG_TEST_SEED repeats a run's choices.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import pytest
import uvloop

from furlong import addresses
from furlong.rundir import RunDir
from tests.system.chaos_engines import NUM_PIECES, Engine
from tests.system.chaos_world import Rollout, Trouble

NUM_ENGINES = 50
NUM_CLIENTS = 200
MAX_IN_FLIGHT = 8
START_LIMIT_S = 30.0
ANSWER_LIMIT_S = 30.0
"""Longer than all of the router's own limits together: a request that takes longer was forgotten."""
FLAGS = (
    "--port=0",
    "--require-policy-version",
    f"--max-in-flight={MAX_IN_FLIGHT}",
    "--queue-timeout-s=4",
    "--connect-timeout-s=1",
    "--first-byte-timeout-s=3",
    "--idle-timeout-s=4",
    "--health-interval-s=0.2",
    "--health-timeout-s=0.5",
    "--health-fail-threshold=2",
    "--health-busy-grace-s=1",
    "--drain-budget-s=3",
)
FAULTS = {"worker_broken", "worker_late", "worker_unreachable"}
NOT_SENT = {"no_ready_worker", "queue_full", "worker_unreachable"}
RSS_LIMIT_MIB = 300
RSS_GROWTH_LIMIT_MIB = 60


@dataclass
class Ledger:
    """What became of every request."""

    outcomes: Counter[str] = field(default_factory=Counter)
    sent: dict[str, str] = field(default_factory=dict)
    """By id, its outcome."""
    wrong: list[str] = field(default_factory=list)

    def close(self, request_id: str, outcome: str) -> None:
        self.outcomes[outcome] += 1
        assert request_id not in self.sent
        self.sent[request_id] = outcome


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], object]]:
    return {"uvloop": uvloop.new_event_loop}


class Client:
    """Asks again as soon as it was answered."""

    def __init__(self, name: int, http: aiohttp.ClientSession, url: str, rollout: Rollout, ledger: Ledger) -> None:
        self._chance = random.Random(name)
        self._name, self._http, self._url = name, http, url
        self._rollout, self._ledger = rollout, ledger

    async def ask_until(self, over: asyncio.Event) -> None:
        number = 0
        while not over.is_set():
            number += 1
            request_id = f"{self._name}-{number}"
            outcome = await self._ask(request_id)
            self._ledger.close(request_id, outcome)
            if outcome in NOT_SENT:
                await asyncio.sleep(0.05)  # a fleet that is away gets no faster by being asked

    async def _ask(self, request_id: str) -> str:
        asked: dict[str, object] = {
            "id": request_id,
            "stream": self._chance.random() < 0.5,
            "seconds": self._chance.uniform(0.01, 0.15),
            "fail": self._chance.random() < 0.02,
        }
        leaves_after_s = self._chance.uniform(0.0, 0.1) if self._chance.random() < 0.05 else ANSWER_LIMIT_S
        try:
            async with asyncio.timeout(leaves_after_s):
                return await self._answer_to(asked, floor=self._rollout.floor)
        except TimeoutError:
            if leaves_after_s == ANSWER_LIMIT_S:
                self._ledger.wrong.append(f"{request_id} was not answered within {ANSWER_LIMIT_S:g} s")
            return "left"

    async def _answer_to(self, asked: dict[str, object], *, floor: int) -> str:
        try:
            async with self._http.post(f"{self._url}/generate", json=asked) as answer:
                body = await answer.read()
        except aiohttp.ClientPayloadError:
            return "cut"
        if answer.status != 200 and b'"error"' in body:
            return self._refusal(answer.status, json.loads(body)["error"], asked)
        said = [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n") if line]
        expected = list(range(NUM_PIECES)) if asked["stream"] else [None]
        if [one.get("number") for one in said] != expected or {one["id"] for one in said} != {asked["id"]}:
            self._ledger.wrong.append(f"{asked} was answered {answer.status} {body[:300]!r}")
        if said and said[0]["version"] < floor:
            self._ledger.wrong.append(f"{asked}, sent when {floor} was confirmed, was answered by {said[0]}")
        if (answer.status == 500) != (asked["fail"] and not asked["stream"]):
            self._ledger.wrong.append(f"{asked} was answered {answer.status}")
        return "whole" if answer.status == 200 else "error of the engine"

    def _refusal(self, status: int, error: dict[str, str], asked: dict[str, object]) -> str:
        kind, blamed = error["type"], error.get("worker", "")
        expected = {"worker_late": 504, "worker_broken": 502}.get(kind, 503)
        if status != expected and not (kind == "worker_unreachable" and status in (502, 504)):
            self._ledger.wrong.append(f"{asked} was answered {status} {error}")
        if kind not in FAULTS | NOT_SENT:
            self._ledger.wrong.append(f"{asked} was refused: {error}")
        if kind in FAULTS and not self._rollout.has_erred(blamed):
            self._ledger.wrong.append(f"{blamed} is blamed for nothing: {error}")
        return kind


@contextlib.asynccontextmanager
async def router(folder: Path, flags: Sequence[str]) -> AsyncGenerator[tuple[psutil.Process, str, str]]:
    """A router in a process of its own, with its HTTP and gRPC address."""
    command = [str(Path(sys.executable).with_name("furlong")), "router", "--dir", str(folder), *FLAGS, *flags]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 (nothing runs yet)
    try:
        entry = await asyncio.to_thread(addresses.wait_for, RunDir(folder), "router", timeout_s=START_LIMIT_S)
        assert entry.http and entry.grpc
        yield psutil.Process(process.pid), entry.http, entry.grpc
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 10)


async def gauges(http: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Requests in flight and in the queue, as the router tells Prometheus."""
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    values = {name: re.findall(rf"^\w*{name}(?:{{.*}})? (\S+)$", text, re.M) for name in ("in_flight", "queue_length")}
    assert all(values.values()), text[:2000]
    return sum(map(float, values["in_flight"])), sum(map(float, values["queue_length"]))


async def chaos(folder: Path, *flags: str, seconds: float) -> None:
    """All of it."""
    seed = int(os.environ.get("FURLONG_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    print(f"FURLONG_TEST_SEED={seed}")
    chance, begun, ledger = random.Random(seed), Counter[str](), Ledger()
    engines = [Engine(begun) for _ in range(NUM_ENGINES)]
    for engine in engines:
        await engine.start()
    connector = aiohttp.TCPConnector(limit=0)
    async with router(folder, flags) as (process, url, address), aiohttp.ClientSession(connector=connector) as http:
        files_before = process.num_fds()
        rollout = Rollout(address, engines)
        await asyncio.gather(*(rollout.add(engine) for engine in engines))
        trouble, over = Trouble(engines, rollout, chance), asyncio.Event()
        tending = asyncio.create_task(rollout.tend())
        clients = [Client(seed + number, http, url, rollout, ledger) for number in range(NUM_CLIENTS)]
        asking = [asyncio.create_task(client.ask_until(over)) for client in clients]
        watching = asyncio.create_task(watch(process, over))
        updating = asyncio.create_task(update(rollout, over, chance))
        await trouble.make(seconds=seconds, every_s=0.15)
        over.set()
        await asyncio.gather(*asking, updating)
        warm_mib, most_mib, most_files = await watching
        tending.cancel()
        left = await settled(http, url, process, files_before)
        await rollout.close()
    for engine in engines:
        engine.die()
    print(f"outcomes {dict(ledger.outcomes)}")
    print(f"trouble {dict(trouble.kinds)}, {rollout.num_updates} weight updates, {rollout.num_confirmed} confirmations")
    print(f"memory {warm_mib:.0f} MiB once warm, {most_mib:.0f} MiB at most; {most_files} files at most; {left}")
    judge(ledger, begun)
    assert left == "settled"
    assert most_mib < RSS_LIMIT_MIB and most_mib - warm_mib < RSS_GROWTH_LIMIT_MIB
    kept = MAX_IN_FLIGHT * NUM_ENGINES  # connections to workers that one process may have opened within a second
    num_processes = 2 if "--processes=2" in flags else 1
    assert most_files < files_before + 2 * NUM_CLIENTS + num_processes * kept + NUM_ENGINES
    assert rollout.num_updates >= 3 and sum(trouble.kinds.values()) > seconds


def judge(ledger: Ledger, begun: Counter[str]) -> None:
    """Every request once, and what was said of it true."""
    twice = {request_id: num for request_id, num in begun.items() if num > 1}
    assert not twice, f"generations that ran more than once: {twice}"
    assert not ledger.wrong, "\n".join(ledger.wrong[:20])
    for request_id, outcome in ledger.sent.items():
        if outcome in ("whole", "error of the engine", "cut"):
            assert begun[request_id] == 1, (request_id, outcome)
        elif outcome in NOT_SENT:
            assert begun[request_id] == 0, (request_id, outcome)
    assert ledger.outcomes["whole"] > 0.7 * ledger.outcomes.total(), ledger.outcomes
    assert ledger.outcomes.total() > 10 * NUM_CLIENTS, ledger.outcomes


async def update(rollout: Rollout, over: asyncio.Event, chance: random.Random) -> None:
    """New weights now and then."""
    while not over.is_set():
        await asyncio.sleep(chance.uniform(0.5, 2.5))
        await rollout.update_weights()


async def watch(process: psutil.Process, over: asyncio.Event) -> tuple[float, float, int]:
    """Memory once it is warm, the most memory, and the most open files."""
    sizes: list[float] = []
    files: list[int] = []
    while not over.is_set():
        await asyncio.sleep(0.25)
        family = [process, *process.children()]
        sizes.append(sum(one.memory_info().rss for one in family) / 2**20)
        files.append(sum(one.num_fds() for one in family))
    return sizes[len(sizes) // 4], max(sizes), max(files)


async def settled(http: aiohttp.ClientSession, url: str, process: psutil.Process, files_before: int) -> str:
    """`settled` once nothing is in flight or queued and connections to workers are closed; else what is left."""
    deadline = asyncio.get_running_loop().time() + 10.0
    while True:
        in_flight, queued = await gauges(http, url)
        more_files = process.num_fds() - files_before - len(await connections_of(process))
        if not in_flight and not queued and more_files < 20:
            return "settled"
        if asyncio.get_running_loop().time() > deadline:
            return f"left: {in_flight:g} in flight, {queued:g} in the queue, {more_files} more files"
        await asyncio.sleep(0.1)


async def connections_of(process: psutil.Process) -> list[object]:
    """Those that clients keep open, which is their right."""
    all_of_them = await asyncio.to_thread(process.net_connections, "tcp")
    listening = {one.laddr for one in all_of_them if one.status == psutil.CONN_LISTEN}
    return [one for one in all_of_them if one.status == psutil.CONN_ESTABLISHED and one.laddr in listening]


@pytest.mark.timeout(90)
async def test_requests_are_answered_once_while_engines_come_and_go(tmp_path: Path) -> None:
    await chaos(tmp_path, seconds=8.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_requests_are_answered_once_through_a_minute_of_trouble(tmp_path: Path) -> None:
    await chaos(tmp_path, seconds=60.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_two_processes_of_a_router_are_one_through_all_of_it(tmp_path: Path) -> None:
    await chaos(tmp_path, "--processes=2", seconds=20.0)
