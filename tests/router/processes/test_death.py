"""Processes of a router that die, drain, and what is left of them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from furlong import addresses
from furlong.config import RunConfig
from furlong.process import ExitCode
from furlong.rundir import RunDir
from services.router.watch.ids import new_request_id
from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import Seen, answer_ok
from tests.router.processes.control import child_pids
from tests.router.processes.talker import Talker, in_flight_ends, talkers
from tests.router.raw_client import exchange, get
from tests.router.waiting import eventually

START_S = 30.0
PROGRAM = textwrap.dedent("""
    import sys
    from furlong.config import RunConfig
    from services.router.main import main
    sys.exit(main(RunConfig.model_validate_json(sys.argv[1]), rank=0, foreground=False))
""")


async def outcome(talker: Talker) -> int:
    """The status, or 0 when the connection broke."""
    try:
        return (await talker.answer()).status
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0


async def test_a_killed_process_costs_its_own_requests_and_no_more(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2, max_in_flight=8)
    release = asyncio.Event()

    async def held(seen: Seen) -> None:
        await release.wait()
        await answer_ok(seen)

    worker = await start_worker(held)
    await router.add(worker)
    async with talkers(router, 8) as made, talkers(router, 4) as waiting:
        for talker in made:
            await talker.send("POST", "/generate", b"{}")
        await worker.arrived(8)
        for talker in waiting:  # for a place at the worker that only the dead process can free
            await talker.send("POST", "/generate", b"{}")
        (pid,) = child_pids()
        os.kill(pid, signal.SIGKILL)
        primary = primary_process()
        lost = [talker for talker in [*made, *waiting] if talker.process != primary]
        assert [await outcome(talker) for talker in lost] == [0] * 6
        await worker.arrived(10)  # those that waited here have the places
        release.set()
        kept = [talker for talker in [*made, *waiting] if talker not in lost]
        assert [await outcome(talker) for talker in kept] == [200] * 6
        await in_flight_ends(router)
    await eventually(lambda: child_pids() not in ([], [pid]), "another process is there")
    async with talkers(router, 6) as again:
        async with asyncio.timeout(10):
            while len({talker.process for talker in again}) < 2:
                again.append(Talker(*await asyncio.open_connection("127.0.0.1", router.port)))
                await again[-1].ask("GET", "/healthz")
        assert [(await talker.generate()).status for talker in again] == [200] * len(again)
    text = (await exchange(router.port, get(b"/metrics"))).body.decode()
    assert "\nfurlong_router_process_restarts_total 1\n" in text


def primary_process() -> str:
    """What the ids of this process, which is the primary, begin with."""
    return new_request_id().decode().partition("-")[0]


async def test_totals_do_not_fall_when_a_process_dies(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(processes=2)
    worker = await start_worker()
    worker_id = await router.add(worker)
    async with talkers(router, 2) as made:
        for talker in made:
            for _ in range(5):
                await talker.generate()
    (pid,) = child_pids()
    await router.listening.router.observer.snapshots()
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: child_pids() not in ([], [pid]), "another process is there")
    found = router.listening.router.workers.find(worker_id)
    assert found is not None and found.num_requests == 10
    text = (await exchange(router.port, get(b"/metrics"))).body.decode()
    lines = [line for line in text.splitlines() if line.startswith("furlong_router_worker_requests_total")]
    assert sum(float(line.split(" ")[1]) for line in lines) == 10


class Process:
    """A router of two processes, apart from this one."""

    def __init__(self, popen: "subprocess.Popen[bytes]", run_dir: RunDir, pids: list[int], port: int) -> None:
        self.popen = popen
        self.run_dir = run_dir
        self.pids = pids
        self.port = port

    async def ended(self) -> int:
        return await asyncio.to_thread(self.popen.wait, 20)

    async def until_none_lives(self) -> None:
        await eventually(lambda: not any(lives(pid) for pid in self.pids), "no process is left", timeout_s=5.0)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


Spawn = Callable[..., Awaitable[Process]]


@pytest.fixture
async def spawn(tmp_path: Path) -> AsyncIterator[Spawn]:
    started: list[subprocess.Popen[bytes]] = []

    async def start(*urls: str, drain_budget_s: float = 5.0) -> Process:
        config = RunConfig.model_validate(
            {
                "run": {"run_dir": str(tmp_path), "drain_budget_s": drain_budget_s},
                "router": {
                    "router_processes": 2,
                    "router_worker_urls": urls,
                    "router_health_interval_s": 0.05,
                    "router_require_policy_version": False,
                },
            }
        )
        command = [sys.executable, "-c", PROGRAM, config.model_dump_json()]
        popen = subprocess.Popen(command, process_group=0)  # noqa: ASYNC220  it returns at once
        started.append(popen)
        entry = await asyncio.to_thread(addresses.wait_for, RunDir(tmp_path), "router", timeout_s=START_S)
        assert entry.http
        port = int(entry.http.rsplit(":", 1)[1])
        async with asyncio.timeout(10):
            while urls and (await exchange(port, get(b"/readyz"))).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return Process(popen, RunDir(tmp_path), [popen.pid, *child_pids(popen.pid)], port)

    yield start
    for popen in started:
        popen.kill()
        popen.wait(10)


@pytest.fixture
def release() -> Iterator[asyncio.Event]:
    event = asyncio.Event()
    yield event
    event.set()


async def both_busy(process: Process) -> list[Talker]:
    """A connection to each process, with a request under way."""
    both = [Talker(*await asyncio.open_connection("127.0.0.1", process.port)) for _ in range(2)]
    for talker in both:
        await talker.ask("GET", "/healthz")
    assert len({talker.process for talker in both}) == 2
    for talker in both:
        await talker.send("POST", "/generate", b"{}")
    return both


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_all_processes_drain_when_the_whole_group_is_told(
    spawn: Spawn, start_worker: StartWorker, release: asyncio.Event, number: signal.Signals
) -> None:
    async def held(seen: Seen) -> None:
        await release.wait()
        await answer_ok(seen)

    worker = await start_worker(held)
    process = await spawn(worker.url)
    assert len(process.pids) == 2
    both = await both_busy(process)
    await worker.arrived(2)
    os.killpg(process.popen.pid, number)
    await eventually(lambda: refuses(process.port), "no new connection is taken")
    release.set()
    assert [await outcome(talker) for talker in both] == [200, 200]
    assert await process.ended() == ExitCode.DRAINED
    await process.until_none_lives()
    assert "router_process_cut_short" not in process.run_dir.log("router").read_text()


def refuses(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(("127.0.0.1", port)) != 0


async def test_a_request_that_outlasts_the_drain_budget_does_not_keep_a_process(
    spawn: Spawn, start_worker: StartWorker, release: asyncio.Event
) -> None:
    async def held(seen: Seen) -> None:
        await release.wait()

    worker = await start_worker(held)
    process = await spawn(worker.url, drain_budget_s=0.5)
    both = await both_busy(process)
    await worker.arrived(2)
    process.popen.terminate()
    assert [await outcome(talker) for talker in both] == [503, 503]
    assert await process.ended() == ExitCode.DRAINED
    await process.until_none_lives()


async def test_a_killed_primary_takes_all_with_it(spawn: Spawn, start_worker: StartWorker) -> None:
    process = await spawn((await start_worker()).url)
    assert len(process.pids) == 2
    assert "router_process_ready" in process.run_dir.log("router-1").read_text()
    told = " ".join(psutil.Process(process.pids[1]).cmdline())
    assert "run_dir" not in told and "token" not in told
    process.popen.kill()
    await process.until_none_lives()


@pytest.mark.slow
async def test_processes_that_are_killed_again_and_again_leave_nothing_behind(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=3, max_in_flight=4)

    async def takes_a_while(seen: Seen) -> None:
        await asyncio.sleep(0.002)
        await answer_ok(seen)

    for _ in range(3):
        await router.add(await start_worker(takes_a_while))
    stop = asyncio.Event()
    statuses: Counter[tuple[bool, int]] = Counter()

    async def ask() -> None:
        while not stop.is_set():
            talker = Talker(*await asyncio.open_connection("127.0.0.1", router.port))
            status = 200
            while status and not stop.is_set():
                await talker.send("POST", "/generate", b"{}")
                status = await outcome(talker)
                statuses[talker.process == primary_process(), status] += 1
            talker.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(32):
            tasks.create_task(ask())
        for number in range(12):
            await eventually(lambda: len(child_pids()) == 2, "both are there", timeout_s=20)
            served = statuses.total()
            await eventually(lambda: statuses.total() > served + 200, "requests are served")  # noqa: B023
            pid = child_pids()[number % 2]
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: pid not in child_pids(), "it is dead", timeout_s=5.0)  # noqa: B023
        stop.set()
    assert statuses[True, 200] > 500 and statuses[False, 200] > 500
    assert statuses[True, 0] == 0 and {status for _, status in statuses} <= {0, 200}
    await in_flight_ends(router)
