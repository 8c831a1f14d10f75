"""Clients' connections over the processes of a router."""

import asyncio
import os
import signal
import ssl
from collections import Counter
from pathlib import Path

import pytest

from furlong.addresses import PortTaken
from services.router.http.server import bind
from services.router.main import listening
from tests.router.conftest import QUICK, StartRouter, StartWorker
from tests.router.http.certificates import Authority
from tests.router.processes.control import child_pids
from tests.router.processes.talker import Talker, talkers
from tests.router.waiting import eventually


async def test_64_connections_lie_evenly_and_new_ones_fill_what_left(start_router: StartRouter) -> None:
    router = await start_router(processes=2)
    async with talkers(router, 64) as made:
        assert sorted(Counter(talker.process for talker in made).values()) == [32, 32]
        leaving = [talker for talker in made if talker.process == made[0].process][:20]
        for talker in leaving:
            talker.close()
            await talker.reader.read()
        observer = router.listening.router.observer

        async def num_open() -> int:
            told = await observer.snapshots()
            return sum(s.get("connections_opened", 0) - s.get("connections_closed", 0) for s in told)

        async with asyncio.timeout(10):
            while await num_open() != 44:  # noqa: ASYNC110  a snapshot is asked for, not told
                await asyncio.sleep(0.01)
        async with talkers(router, 20) as more:
            left = [talker for talker in made if talker not in leaving]
            assert sorted(Counter(talker.process for talker in [*left, *more]).values()) == [32, 32]


async def test_a_taken_port_is_noticed() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(PortTaken):
        port = taken.getsockname()[1]
        async with listening(QUICK, host="127.0.0.1", http_port=port, grpc_port=0, drain_s=1.0):
            pass


async def test_the_limit_of_connections_is_over_all_processes(start_router: StartRouter) -> None:
    router = await start_router(processes=2, max_connections=4)
    async with talkers(router, 4) as made:
        assert [(await talker.ask("GET", "/healthz")).status for talker in made] == [200] * 4
        one_too_many = Talker(*await asyncio.open_connection("127.0.0.1", router.port))
        await one_too_many.send("GET", "/healthz")
        assert (await one_too_many.answer()).status == 503
        one_too_many.close()


async def test_tls_is_spoken_by_all(start_router: StartRouter, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "test")
    made = authority.issue("127.0.0.1")
    router = await start_router(processes=2, tls_cert=str(made.cert), tls_key=str(made.key))
    context = ssl.create_default_context(cafile=str(authority.path))
    both = [Talker(*await asyncio.open_connection("127.0.0.1", router.port, ssl=context)) for _ in range(2)]
    for talker in both:
        assert (await talker.ask("GET", "/healthz")).status == 200
    assert len({talker.process for talker in both}) == 2
    broken = await asyncio.open_connection("127.0.0.1", router.port)
    broken[1].write(b"this is no TLS\r\n\r\n")
    await broken[0].read()
    for talker in both:
        talker.close()


async def test_what_a_dead_process_was_given_and_had_not_taken_is_not_lost(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(processes=2)
    await router.add(await start_worker())
    (pid,) = child_pids()
    os.kill(pid, signal.SIGSTOP)
    both = [Talker(*await asyncio.open_connection("127.0.0.1", router.port)) for _ in range(2)]
    for talker in both:
        await talker.send("POST", "/generate", b"{}")
    first, pending = await asyncio.wait(
        [asyncio.create_task(talker.answer()) for talker in both], return_when=asyncio.FIRST_COMPLETED
    )
    assert len(first) == len(pending) == 1  # one of them was given to the process that stands still
    os.kill(pid, signal.SIGKILL)
    assert (await pending.pop()).status == 200
    await eventually(lambda: child_pids() not in ([pid], []), "another process is there")
    for talker in both:
        talker.close()
