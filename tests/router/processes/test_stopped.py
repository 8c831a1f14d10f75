"""Processes of a router that are stopped for a while, or do not get to run, are not taken for what they are not."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from services.router.processes import primary
from services.router.processes.memory import SharedMemory
from tests.router.conftest import StartRouter, StartWorker
from tests.router.processes.control import child_pids
from tests.router.processes.talker import talkers
from tests.router.waiting import eventually

HOLD = """
import os, signal, sys
from services.router.processes.memory import SharedMemory
memory = SharedMemory(int(sys.argv[1]), num_processes=2, num_slots=4)
memory.lock(1)
print("held", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_process_that_is_stopped_while_it_holds_a_lock_holds_nobody_up() -> None:
    memory = SharedMemory.create(num_processes=2, num_slots=4)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(memory.fd)], pass_fds=[memory.fd], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        began = time.monotonic()
        with memory.locked(0):
            assert time.monotonic() - began < 0.5
        with memory.locked(1):
            assert time.monotonic() - began < 5.0
        assert holder.wait(5) == -signal.SIGKILL
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close() if holder.stdout else None
        os.close(memory.fd)


async def test_a_process_that_only_starts_is_not_waited_for(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2)
    (pid,) = child_pids()
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: child_pids() not in ([], [pid]), "another process is there")
    (pid,) = child_pids()
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    worker_id = await router.add(await start_worker())
    assert time.monotonic() - began < primary.ACK_LIMIT_S / 2
    router.listening.router.remove(worker_id)
    await router.listening.router.settled()
    os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(15), talkers(router, 1) as (first,):
        while True:
            async with talkers(router, 1) as (other,):
                if other.process != first.process:
                    break
            await asyncio.sleep(0.05)
    assert child_pids() == [pid]


async def test_a_primary_that_did_not_run_does_not_judge_the_others(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primary, "SILENT_S", 2.0)
    await start_router(processes=2)
    pids = child_pids()
    time.sleep(3.5)  # noqa: ASYNC251  as if it had been stopped
    await asyncio.sleep(primary.LOOK_S + 0.5)
    assert child_pids() == pids
