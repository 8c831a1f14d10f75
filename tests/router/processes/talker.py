"""A client with one connection, which therefore talks to one process of the router, and knows which."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import orjson

from tests.router.conftest import Running
from tests.router.waiting import eventually

LIMIT_S = 15.0


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:  # type: ignore[type-arg]
        return orjson.loads(self.body)


class Talker:
    """One connection. `process`: what the ids that its process makes begin with, once it has answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.process = ""

    async def send(self, method: str, target: str, body: bytes = b"", *, headers: str = "") -> None:
        length = f"content-length: {len(body)}\r\n" if body or method != "GET" else ""
        self.writer.write(f"{method} {target} HTTP/1.1\r\nhost: router\r\n{length}{headers}\r\n".encode() + body)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """The next answer. Raises IncompleteReadError or ConnectionError when the connection ends instead."""
        async with asyncio.timeout(LIMIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip("\r\n").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        self.process = headers.get("x-request-id", "").partition("-")[0] or self.process
        return Answer(int(first.split(" ")[1]), headers, body)

    async def ask(self, method: str, target: str, body: bytes = b"", *, headers: str = "") -> Answer:
        await self.send(method, target, body, headers=headers)
        return await self.answer()

    async def generate(self, *, headers: str = "") -> Answer:
        return await self.ask("POST", "/generate", b"{}", headers=headers)

    def close(self) -> None:
        self.writer.close()


@contextlib.asynccontextmanager
async def talkers(router: Running, number: int) -> AsyncGenerator[list[Talker]]:
    """So many connections, each of which has asked once how the router is, and knows its process."""
    made = [Talker(*await asyncio.open_connection("127.0.0.1", router.port)) for _ in range(number)]
    try:
        for talker in made:
            await talker.ask("GET", "/healthz")
        yield made
    finally:
        for talker in made:
            talker.close()


@contextlib.asynccontextmanager
async def one_of_each(router: Running) -> AsyncGenerator[list[Talker]]:
    """A connection to each of two processes."""
    async with talkers(router, 2) as made:
        assert len({talker.process for talker in made}) == 2, "each process has one of two connections"
        yield made


async def in_flight_ends(router: Running) -> None:
    """Wait until no worker has anything in flight, over all processes."""
    workers = router.listening.router.workers
    await eventually(lambda: all(w.in_flight == 0 for w in workers.all()), "nothing is in flight")
