"""A worker for tests: a raw HTTP server whose behaviour a test writes as a function.

No HTTP library, so that it can break every rule: die, hang, drip, cut, close at any byte.
"""

import asyncio
import select
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

Raw = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Seen:
    """A request as it arrived."""

    head: bytes
    """Everything up to and including the empty line."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body: bytes = b""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client closed the connection while the request was being handled."""

    @property
    def line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def path(self) -> bytes:
        return self.line.split(b" ")[1].split(b"?")[0]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]

    def header(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes = b"{}", *, status: bytes = b"200 OK", extra: bytes = b"") -> None:
        length = b"content-length: %d\r\n" % len(body)
        await self.send(b"HTTP/1.1 " + status + b"\r\n" + length + extra + b"\r\n" + body)


Handler = Callable[[Seen], Awaitable[None]]


async def answer_ok(seen: Seen) -> None:
    await seen.answer(b'{"text":"ok"}', extra=b"content-type: application/json\r\n")


class FakeWorker:
    """Listens on a port of its own. `handler` answers what is not a probe; `requests` has seen all of those."""

    def __init__(self, handler: Handler = answer_ok) -> None:
        self.handler = handler
        self.ready_status = b"200 OK"
        self.probe_handler: Handler = self._answer_probe
        self.keep_alive_s: float | None = None
        self.read_bodies = True
        self.requests: list[Seen] = []
        self.probes: list[Seen] = []
        self.num_connections = 0
        self.port = 0
        self.host = "127.0.0.1"
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrival = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    async def start(self) -> "FakeWorker":
        self._server = await asyncio.start_server(self._connected, self.host, self.port, backlog=2048, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def die(self) -> None:
        """As a killed process: the port closes and every connection is reset."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for writer in list(self._connections):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def arrived(self, count: int = 1) -> list[Seen]:
        """Wait until so many requests came."""
        async with asyncio.timeout(10):
            while len(self.requests) < count:
                self._arrival.clear()
                await self._arrival.wait()
        return self.requests

    async def _answer_probe(self, seen: Seen) -> None:
        await seen.answer(b"", status=self.ready_status)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            while await self._one_request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._connections.discard(writer)
            writer.close()

    async def _next_head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Closes a connection that is unused for too long, but, like servers that are used, none that a request has
        come on, however late this process got to look."""
        while True:
            try:
                async with asyncio.timeout(self.keep_alive_s):
                    return await reader.readuntil(b"\r\n\r\n")
            except TimeoutError:
                if not has_come(reader, writer):
                    raise

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await self._next_head(reader, writer)
        seen = Seen(head, reader, writer)
        is_probe = seen.path in (b"/ready", b"/health") and seen.line.startswith(b"GET")
        if self.read_bodies or is_probe:
            seen.body = await read_body(seen)
        if is_probe:
            self.probes.append(seen)
            await self.probe_handler(seen)
        else:
            self.requests.append(seen)
            self._arrival.set()
            await self.handler(seen)
        return not writer.is_closing() and b"close" not in seen.header(b"connection")


def has_come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether bytes are there that nobody has read."""
    here: bytearray = reader._buffer  # type: ignore[attr-defined]  # there is no public way to look
    return bool(here) or bool(select.select([writer.get_extra_info("socket").fileno()], [], [], 0)[0])


async def read_body(seen: Seen) -> bytes:
    """The body of a request, by length or chunks."""
    if seen.header(b"transfer-encoding"):
        body = b""
        while size := int(await seen.reader.readuntil(b"\r\n"), 16):
            body += (await seen.reader.readexactly(size + 2))[:-2]
        await seen.reader.readexactly(2)
        return body
    length = seen.header(b"content-length")
    return await seen.reader.readexactly(int(length[0])) if length else b""


async def wait_gone(seen: Seen) -> None:
    """Return when the router closed the connection of a request."""
    async with asyncio.timeout(10):
        while await seen.reader.read(65536):
            pass
    seen.gone.set()
