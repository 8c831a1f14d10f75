"""From a worker's host name to its addresses: each name is looked up by a thread of its own, once at a time.

The event loop's own look-ups share a few threads: some names that no name server answers for would hold up all others.
What was found is kept for a few seconds, and longer while nothing better can be had: workers that run do not depend on
the name service. Opens no connection.
"""

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEEP_S = 5.0
"""How long what was found is taken for true."""
GRACE_S = 0.5
"""How long is waited for a new answer where an old one is at hand."""
MAX_KEPT = 4096

_Found = list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]]
LookUp = Callable[[str, int], _Found]


@dataclass(frozen=True, slots=True)
class Address:
    """An address that needs no name service."""

    family: socket.AddressFamily
    address: tuple[str, int] | tuple[str, int, int, int]


@dataclass(slots=True)
class _Known:
    addresses: Sequence[Address]
    until: float


_Key = tuple[asyncio.AbstractEventLoop, str, int]


def look_up(host: str, port: int) -> _Found:
    """Ask the system. Blocks, for as long as the name service likes."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # type: ignore[return-value]


class Names:
    """What is known of names."""

    def __init__(self, look_up: LookUp = look_up, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._look_up = look_up
        self._clock = clock
        self._known: dict[tuple[str, int], _Known] = {}
        self._asked: dict[_Key, asyncio.Future[Sequence[Address]]] = {}

    async def addresses(self, host: str, port: int) -> Sequence[Address]:
        """In the order of the system's preference. Raises OSError; waits as long as the name service takes."""
        known = self._known.get((host, port))
        if known is not None and self._clock() < known.until:
            return known.addresses
        key = (asyncio.get_running_loop(), host, port)
        asked = self._asked.get(key) or self._ask(key)
        if known is None:
            return await asyncio.shield(asked)
        await asyncio.wait([asked], timeout=GRACE_S)
        if asked.done() and asked.exception() is None:
            return asked.result()
        known.until = self._clock() + KEEP_S
        return known.addresses

    def _ask(self, key: _Key) -> "asyncio.Future[Sequence[Address]]":
        loop, host, port = key
        asked = self._asked[key] = loop.create_future()
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked at it

        def run() -> None:
            found: _Found | OSError
            try:
                found = self._look_up(host, port)
            except OSError as error:
                found = error
            except UnicodeError as error:  # a label of more than 63 characters
                found = OSError(errno.EINVAL, str(error))
            except Exception as error:  # the top of a thread; a name must not be left unanswered
                found = OSError(errno.EIO, repr(error))
            with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
                loop.call_soon_threadsafe(self._answered, key, found)

        try:
            threading.Thread(target=run, name=f"look_up {host}", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._answered(key, OSError(errno.ENOMEM, str(error)))
        return asked

    def _answered(self, key: _Key, found: "_Found | OSError") -> None:
        asked = self._asked.pop(key)
        if isinstance(found, OSError):
            asked.set_exception(found)
            return
        addresses = [Address(family, address) for family, _, _, _, address in found]
        if len(self._known) >= MAX_KEPT:
            self._known.clear()
        self._known[key[1:]] = _Known(addresses, self._clock() + KEEP_S)
        asked.set_result(addresses)
