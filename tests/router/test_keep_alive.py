"""Kept connections meet workers that close them: no request is lost, none is sent twice."""

import asyncio
import socket
import threading
import time
from collections import Counter

from services.router.http.connections import Connections, open_connection
from services.router.http.upstream import Connection, NothingAccepted, UpstreamError
from services.router.workers.urls import parse_worker_url
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import FakeWorker
from tests.router.waiting import eventually

KEEP_ALIVE_S = 0.02
REQUEST = b"POST /generate HTTP/1.1\r\ncontent-length: 0\r\n\r\n"


async def post_around_the_keep_alive(router: Running, worker: FakeWorker) -> Counter[int]:
    """60 posts, each about when the worker closes the connection of the one before; how they were answered."""
    worker.keep_alive_s = KEEP_ALIVE_S
    await router.add(worker)
    statuses: Counter[int] = Counter()
    for number in range(60):
        async with router.http.post(f"{router.url}/generate", json={"n": number}) as answer:
            statuses[answer.status] += 1
        await asyncio.sleep(KEEP_ALIVE_S * (0.9 + 0.004 * number))
    return statuses


async def test_no_request_is_lost_around_the_workers_keep_alive(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(idle_connection_s=KEEP_ALIVE_S / 4)  # the default is a fifth of SGLang's 5 s
    worker = await start_worker()
    assert await post_around_the_keep_alive(router, worker) == {200: 60} and len(worker.requests) == 60


async def test_a_router_that_keeps_connections_too_long_learns_it(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """At most the first meeting is lost, when the worker's reset does not tell what it read; none is sent twice."""
    router = await start_router(idle_connection_s=60.0)
    worker = await start_worker()
    statuses = await post_around_the_keep_alive(router, worker)
    assert statuses[200] >= 59 and statuses[200] == len(worker.requests)


async def test_requests_close_together_share_a_connection(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router()
    worker = await start_worker()
    await router.add(worker)
    trust(router)
    for _ in range(50):
        async with router.http.post(f"{router.url}/generate", json={}) as answer:
            await answer.read()
    assert len({id(seen.writer) for seen in worker.requests}) == 1


def trust(router: Running) -> None:
    """As after a while, in which the workers were seen to keep connections."""
    for worker in router.listening.router.workers.all():
        router.listening.router.proxy.connections_to(worker).proven_s = 60.0


class Asked:
    """Who asked, and what came of it."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.error: UpstreamError | None = None

    def on_answer(self, connection: Connection, body: bytes) -> None:
        if connection.complete:
            self.over.set()

    def on_error(self, connection: Connection, error: UpstreamError) -> None:
        self.error = error
        self.over.set()

    def on_writable(self, connection: Connection) -> None:
        """Nothing is written here that would not fit."""


async def ask(connection: Connection, peer: socket.socket) -> UpstreamError | None:
    """Send a request, let it be answered, wait for its end; the error it ended in."""
    asked = Asked()
    connection.begin(asked, "POST")
    connection.write(REQUEST)
    serve(peer)
    async with asyncio.timeout(5):
        await asked.over.wait()
    if asked.error is None:
        connection.finish()
    return asked.error


async def test_a_connection_closed_before_the_request_came_is_told_from_one_closed_after() -> None:
    """The first cannot have run; the second may have."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = parse_worker_url(f"http://127.0.0.1:{server.getsockname()[1]}")
        for served in (0, 1):
            connection = await open_connection(url, timeout_s=1)
            peer, _ = server.accept()
            for _ in range(served):
                assert await ask(connection, peer) is None
            asked = Asked()
            connection.begin(asked, "POST")
            peer.close()  # as the request is on its way
            connection.write(REQUEST)
            async with asyncio.timeout(5):
                await asked.over.wait()
            assert isinstance(asked.error, NothingAccepted)

        connection = await open_connection(url, timeout_s=1)
        peer, _ = server.accept()
        asked = Asked()
        connection.begin(asked, "POST")
        connection.write(REQUEST)
        assert await asyncio.to_thread(peer.recv, 1000) == REQUEST
        peer.close()
        async with asyncio.timeout(5):
            await asked.over.wait()
        assert asked.error is not None and not isinstance(asked.error, NothingAccepted)
        assert "without an answer" in str(asked.error)


def serve(peer: socket.socket) -> None:
    """Answer as soon as the request is there, on a thread: the router's side runs meanwhile."""

    def run() -> None:
        assert peer.recv(1000) == REQUEST
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    threading.Thread(target=run, daemon=True).start()


async def test_a_worker_seen_closing_connections_is_given_fresh_ones(start_worker: StartWorker) -> None:
    worker = await start_worker()
    worker.keep_alive_s = 0.05
    connections = Connections(parse_worker_url(worker.url), connect_timeout_s=1, idle_s=60)
    assert connections.take(idempotent=True) is None
    connection = await connections.open()
    asked = Asked()
    connection.begin(asked, "GET")
    connection.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(5):
        await asked.over.wait()
    connections.put(connection, time.monotonic())
    await eventually(lambda: connection.lost, "the worker closed it")
    assert connections.idle_s < 0.05
    assert connections.take(idempotent=True) is None


async def test_an_end_that_nobody_has_read_yet_is_seen_before_the_connection_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = parse_worker_url(f"http://127.0.0.1:{server.getsockname()[1]}")
        connections = Connections(url, connect_timeout_s=1, idle_s=60)
        connection = await connections.open()
        peer, _ = server.accept()
        assert await ask(connection, peer) is None
        connections.put(connection, time.monotonic() - 1.0)
        peer.close()  # and the event loop does not run from here on
        assert not connection.lost and connections.take(idempotent=True) is None


async def test_a_post_gets_no_connection_that_was_unused_for_longer_than_the_worker_has_shown_to_bear() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = parse_worker_url(f"http://127.0.0.1:{server.getsockname()[1]}")
        connections = Connections(url, connect_timeout_s=1, idle_s=60)
        connection = await connections.open()
        peer, _ = server.accept()
        assert await ask(connection, peer) is None
        connections.put(connection, time.monotonic() - 1.0)
        assert connections.take(idempotent=False) is None  # nothing is known of this worker yet
        assert 1.0 <= connections.proven_s < 2.0
        assert connections.take(idempotent=True) is connection
        connections.put(connection, time.monotonic() - 0.4)
        assert connections.take(idempotent=False) is connection
        peer.close()
