"""Signals and the leash, with real processes."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from furlong.process import ExitCode, StopSignal, die_with_parent
from tests.processes import left_after

LIMIT_S = 20.0

PARENT = textwrap.dedent("""
    import os, subprocess, sys, time
    child = '''
    import os, sys, time
    from furlong.process import die_with_parent
    die_with_parent(int(sys.argv[1]))
    print(os.getpid(), flush=True)
    time.sleep(60)
    '''
    subprocess.Popen([sys.executable, "-c", child, str(os.getpid())])
    time.sleep(60)
""")

SERVICE = textwrap.dedent("""
    import asyncio, sys, threading
    from furlong.process import StopSignal
    stop = StopSignal().install()

    async def main():
        print("waiting", flush=True)
        await stop.wait()
        print(stop.reason, flush=True)
        if "hang" in sys.argv:
            await asyncio.sleep(60)

    if "uvloop" in sys.argv:
        import uvloop
        uvloop.run(main())
    elif "threads" in sys.argv:
        print("waiting", flush=True)
        stop.requested.wait(60)
        print(stop.reason, flush=True)
    else:
        asyncio.run(main())
    sys.exit(stop.code)
""")


def run(program: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *args], stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_leashed_child_dies_when_its_parent_is_killed() -> None:
    parent = run(PARENT)
    child = psutil.Process(int(line(parent)))
    parent.kill()
    parent.wait(LIMIT_S)
    assert left_after([child], within_s=2.0) == []


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    program = "from furlong.process import die_with_parent; die_with_parent(1 << 22); print('still here')"
    process = run(program)
    assert process.wait(LIMIT_S) == ExitCode.PEER_LOST and line(process) == ""


def test_no_parent_is_no_leash() -> None:
    die_with_parent(None)


@pytest.mark.parametrize("how", ["asyncio", "uvloop", "threads"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_to_stop(how: str, number: signal.Signals) -> None:
    process = run(SERVICE, how)
    assert line(process) == "waiting"
    process.send_signal(number)
    assert line(process) == number.name
    assert process.wait(LIMIT_S) == ExitCode.DRAINED


def test_a_second_signal_ends_at_once() -> None:
    process = run(SERVICE, "hang")
    assert line(process) == "waiting"
    process.send_signal(signal.SIGTERM)
    assert line(process) == "SIGTERM"
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == ExitCode.KILLED and time.monotonic() - started < 2


def test_a_signal_that_meets_the_lock_of_the_event_does_not_block() -> None:
    """The handler runs in the main thread between any two of its instructions."""
    stop = StopSignal()
    lock = vars(stop.requested)["_cond"]
    with lock:  # as inside of requested.wait()
        stop._handle(signal.SIGTERM, None)
    assert stop.requested.wait(LIMIT_S) and stop.reason == "SIGTERM"


def test_the_first_reason_and_code_stay() -> None:
    stop = StopSignal()
    assert (stop.code, stop.requested.is_set()) == (ExitCode.DONE, False)
    stop.request("task failed", code=ExitCode.CRASHED)
    stop.request("SIGTERM")
    assert (stop.reason, stop.code) == ("task failed", ExitCode.CRASHED)


async def test_a_request_from_another_thread_wakes_all_who_wait() -> None:
    stop = StopSignal()
    waiting = [asyncio.create_task(stop.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    threading.Thread(target=stop.request, args=("over",)).start()
    await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
    await asyncio.wait_for(stop.wait(), LIMIT_S)


def test_a_request_after_the_loop_ended_raises_nothing() -> None:
    stop = StopSignal()

    async def give_up() -> None:
        try:
            await asyncio.wait_for(stop.wait(), 0.01)
        except TimeoutError:
            return

    asyncio.run(give_up())
    stop.request("late")
    assert stop.requested.is_set()


def test_exit_codes_differ() -> None:
    assert len({int(code) for code in ExitCode}) == len(ExitCode)
