"""A router that did not run for a while (stopped, or its machine was) finds answers that came meanwhile: it must read
them before it calls anybody late."""

import asyncio
import socket
import threading
import time

from tests.router.conftest import Running, StartRouter
from tests.router.raw_client import exchange, post
from tests.router.waiting import eventually

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
LIMIT_S = 0.5
WORK_S = 0.2
STANDSTILL_S = 1.5


def serve(server: socket.socket) -> None:
    """On a thread, which runs on while the router stands still."""

    def one(client: socket.socket) -> None:
        with client:
            if client.recv(65536).startswith(b"POST"):
                time.sleep(WORK_S)
            client.sendall(ANSWER)

    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=one, args=(client,), daemon=True).start()


def stop_the_loop() -> None:
    """As a stopped process: amid its look at sockets, so that timers come before it looks at them again."""
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()

    def stop() -> None:
        loop.remove_reader(here)
        here.close()
        there.close()
        time.sleep(STANDSTILL_S)

    loop.add_reader(here, stop)
    there.send(b"x")


async def stand_still(router: Running, requests: int) -> list[int]:
    """Send requests to a worker that answers while the router does nothing; what they were answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        workers = router.listening.router.workers
        worker = router.listening.router.add(f"http://127.0.0.1:{server.getsockname()[1]}", admit=True)
        await eventually(lambda: workers.num_ready() == 1, "the worker is ready")
        asked = [asyncio.create_task(exchange(router.port, post(b"/x"))) for _ in range(requests)]
        await eventually(lambda: worker.in_flight + workers.num_waiting() == requests, "all have come")
        await asyncio.sleep(WORK_S / 4)
        stop_the_loop()
        answers = [(await each).status for each in asked]
        assert worker.num_failures == 0
        server.shutdown(socket.SHUT_RDWR)
    return answers


async def test_a_worker_that_answered_meanwhile_was_not_late(start_router: StartRouter) -> None:
    router = await start_router(first_byte_timeout_s=LIMIT_S)
    assert await stand_still(router, 3) == [200] * 3


async def test_who_waits_for_a_worker_that_became_free_meanwhile_gets_it(start_router: StartRouter) -> None:
    router = await start_router(first_byte_timeout_s=LIMIT_S, queue_timeout_s=LIMIT_S, max_in_flight=1)
    assert await stand_still(router, 2) == [200] * 2
