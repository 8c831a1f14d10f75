"""A router of no run is ended and started again under load: its workers are there again, and requests fail only while
it is away."""

import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.started_alone import Alone
from tests.metrics.running import until

NUM_CLIENTS = 12
WORK_S = 0.05


class Engines:
    """Two workers that answer after a moment and count what they ran."""

    def __init__(self) -> None:
        self.ran: Counter[bytes] = Counter()
        ran = self.ran

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(b"{}")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                ran[body] += 1
                threading.Event().wait(WORK_S)
                self._answer(body)

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        for server in self.servers:
            server.handle_error = lambda *_: None  # type: ignore[method-assign] # a router that was killed
            threading.Thread(target=server.serve_forever, daemon=True).start()


@pytest.fixture
def engines() -> Iterator[Engines]:
    running = Engines()
    yield running
    for server in running.servers:
        server.shutdown()
        server.server_close()


@dataclass
class Load:
    """Clients that ask again and again; when each request began and ended, and whether its own answer came."""

    url: str
    ended: list[tuple[float, float, bool]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Load":
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(30)

    def _ask(self, client: int) -> None:
        number = 0
        while not self.stop.is_set():
            number, began = number + 1, time.monotonic()
            body = f"client {client} request {number}".encode()
            try:
                with urllib.request.urlopen(f"{self.url}/generate", body, timeout=20) as answer:
                    good = answer.read() == body
            except OSError:
                good = False
                self.stop.wait(0.02)
            self.ended.append((began, time.monotonic(), good))

    def wait_for_good(self, num: int) -> None:
        """Until so many more were answered well."""
        num += sum(good for _, _, good in self.ended)
        until(lambda: sum(good for _, _, good in list(self.ended)) >= num, "requests are answered", limit_s=30.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_requests_fail_only_while_the_router_is_away(tmp_path: Path, engines: Engines, number: signal.Signals) -> None:
    port, flags = free_port(), ["--health-interval-s", "0.2"]
    router = Alone(tmp_path / "kept", *flags, port=port, service="router")
    try:
        for server in engines.servers:
            body = f'{{"url": "http://127.0.0.1:{server.server_port}"}}'.encode()
            urllib.request.urlopen(f"{router.http}/workers", body, timeout=10).close()
        with Load(router.http) as load:
            load.wait_for_good(100)
            down_at = time.monotonic()
            router.end(number)
            router = Alone(tmp_path / "kept", *flags, port=port, service="router")
            up_at = time.monotonic()
            load.wait_for_good(200)
    finally:
        router.end()
    bad = [(began - down_at, ended - down_at) for began, ended, good in load.ended if not good]
    assert bad and all(ended > down_at and began < up_at for began, ended, good in load.ended if not good), bad
    assert set(engines.ran.values()) == {1}
    if number == signal.SIGTERM:  # what was under way has ended in peace
        assert all(began > 0 for began, _ in bad), bad
