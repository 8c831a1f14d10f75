"""Fake engines on real sockets, many in one process: they hold a policy version, generate, die, hang and come back.

They count how often each generation began. Nothing here knows of the router.
"""

import asyncio
import json
from collections import Counter
from typing import cast

import httptools

NUM_PIECES = 4
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BASE_VERSION = -1
"""Of an engine that has loaded its weights from disk: older than any that was published."""


class Engine:
    """One engine. It keeps its port when it dies, and comes back with the weights it has on disk."""

    def __init__(self, begun: Counter[str]) -> None:
        self.port = 0
        self.version = BASE_VERSION
        self.life = 0
        """Grows with each start."""
        self.awake = asyncio.Event()
        self.num_faults = 0
        """How often it gave anyone cause to complain."""
        self.begun = begun
        """By generation id, of all engines."""
        self.connections: set[EngineConnection] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def hung(self) -> bool:
        return not self.awake.is_set()

    @property
    def alive(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        """With the weights on disk. Raises OSError when the port was taken meanwhile."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: EngineConnection(self), "127.0.0.1", self.port, backlog=1024, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.version, self.life = BASE_VERSION, self.life + 1
        self.awake.set()

    def die(self) -> None:
        """As a killed process does: the port refuses, all connections are reset."""
        self.num_faults += 1
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.transport.abort()

    def hang(self) -> None:
        """As a stopped process: connections are accepted, nothing is answered any more."""
        self.num_faults += 1
        self.awake.clear()

    def wake(self) -> None:
        """Go on with what came meanwhile."""
        self.awake.set()
        for connection in list(self.connections):
            connection.go_on()


class EngineConnection(asyncio.Protocol):
    """Answers one request after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._engine.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._engine.hung:
            self._held += data
        else:
            self._parser.feed_data(data)

    def go_on(self) -> None:
        """After a hang."""
        held, self._held = self._held, b""
        if held:
            self._parser.feed_data(held)

    def on_message_begin(self) -> None:
        self._target, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._target != b"/generate":
            self._answer(200, b"{}")
            return
        asked = json.loads(self._body)
        self._engine.begun[asked["id"]] += 1
        self._task = asyncio.create_task(self._generate(asked))

    async def _generate(self, asked: dict[str, object]) -> None:
        """The version is that of the beginning, as SGLang's is of a request that no update interrupts."""
        said = {"id": asked["id"], "version": self._engine.version, "url": self._engine.url}
        seconds = cast(float, asked["seconds"])
        if not asked["stream"]:
            await self._work(seconds)
            self._answer(500 if asked["fail"] else 200, json.dumps(said).encode())
            return
        self.transport.write(STREAM)
        for number in range(NUM_PIECES):
            await self._work(seconds / NUM_PIECES)
            if asked["fail"] and number == NUM_PIECES // 2:
                self._engine.num_faults += 1
                self.transport.close()
                return
            piece = b"data: %s\n\n" % json.dumps({**said, "number": number}).encode()
            self.transport.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.transport.write(b"0\r\n\r\n")

    async def _work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._engine.awake.wait()

    def _answer(self, status: int, body: bytes) -> None:
        self.transport.write(b"HTTP/1.1 %d As asked\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
