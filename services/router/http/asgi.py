"""ASGI's types, as far as they are used here, and a client's request seen through them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from services.router.http.headers import RawHeaders, first_value

Scope = MutableMapping[str, Any]  # Any: ASGI's messages are open dictionaries
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientLeft(Exception):
    """The client closed its connection before its request was answered."""


class BodyTooLarge(Exception):
    """The body is larger than what is read here."""


class ClientRequest:
    """A request as the client sent it."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        extensions = scope.get("extensions", {})
        self.method: str = scope["method"]
        self.headers: RawHeaders = scope["headers"]
        self.target = _origin_form(extensions["furlong.target"])
        self.wants_upgrade: bool = extensions["furlong.upgrade"]
        self.break_off: Callable[[], None] = extensions["furlong.break_off"]
        self._receive = receive
        self.first = b""
        """The bytes of the body that came first."""
        self.whole = False
        """Whether those are all of it."""

    @property
    def idempotent(self) -> bool:
        """Whether running it twice is the same as once."""
        return self.method in ("GET", "HEAD")

    @property
    def declared_length(self) -> int | None:
        """What content-length says; None: the client sends chunks, or no body at all."""
        value = first_value(self.headers, b"content-length")
        return int(value) if value is not None else None

    async def begin(self) -> None:
        """Wait for the first bytes of the body. Raises ClientLeft."""
        self.first, self.whole = await self._next()

    async def next_bytes(self) -> tuple[bytes, bool]:
        """More bytes of the body, and whether they are the last. Raises ClientLeft."""
        return await self._next()

    async def until_left(self) -> None:
        """Wait until the client goes away. Only once the body has been read."""
        while True:
            try:
                await self._next()
            except ClientLeft:
                return

    async def small_body(self, *, max_bytes: int) -> bytes:
        """All of the body. Raises BodyTooLarge, ClientLeft."""
        body, whole = self.first, self.whole
        while not whole and len(body) <= max_bytes:
            more, whole = await self._next()
            body += more
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body must have at most {max_bytes} bytes")
        return body

    async def _next(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        return message.get("body", b""), not message.get("more_body", False)


class Leash:
    """Cancels a request's task when its client goes away; keeps the watching task.

    watch: returns when the client left.
    """

    def __init__(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.client_left = False
        self._owner = asyncio.current_task()
        self._task = asyncio.create_task(self._run(watch))
        self._off = False

    def let_go(self) -> None:
        """The request is answered: nothing is cancelled from now on."""
        self._off = True
        self._task.cancel()

    async def _run(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await watch()
        if not self._off and self._owner is not None:
            self.client_left = True
            self._owner.cancel()


def _origin_form(target: bytes) -> bytes:
    """PATH?QUERY of a request target, which a client of a forward proxy sends with scheme and host before it."""
    if target.startswith(b"/"):
        return target
    _, found, rest = target.partition(b"://")
    slash = rest.find(b"/")
    return rest[slash:] if found and slash >= 0 else b"/"
