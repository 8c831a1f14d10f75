"""Connections to workers: opening them, and keeping unused ones for a short while.

Knows addresses only; who gets which request is decided elsewhere. A request that may not run twice (POST) and a
connection that the worker may be closing just now are a bad match, so a connection is kept much shorter than workers
keep it, shorter still once a worker was seen closing one; a request that must not be lost gets one that was unused no
longer than half of what the worker has shown to bear; and `upstream.NothingAccepted` proves the rest.
"""

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Iterable, Sequence

from services.router.http.names import Address, Names
from services.router.http.tcp import keep_watch
from services.router.http.tls import worker_context
from services.router.http.upstream import Connection
from services.router.workers.urls import WorkerUrl, refused_address

FIRST_TRUST_S = 0.0025
"""How long a connection to a worker that nothing is known of may have been unused, to carry a request that must not be
lost. After that it is trusted for half as long as connections to it were seen to live."""


class NotOpened(Exception):
    """No connection could be opened, so nothing was sent; the message says why."""


class Refused(NotOpened):
    """Nobody listens there."""


class ConnectTimeout(NotOpened):
    """It did not open in time."""


class Exhausted(NotOpened):
    """This machine gives the router no more files, ports or memory: nothing is known of the worker."""


OWN_SHORTAGE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


NAMES = Names()
"""Of this process."""


async def open_connection(url: WorkerUrl, *, timeout_s: float, worker_ca: str = "") -> Connection:
    """A fresh connection. Raises NotOpened.

    worker_ca: PEM file of whom to trust over https; empty: the system's authorities.
    """
    try:
        where = ip_of(url)
        if where is not None and url.scheme == "http":
            return await _open_at(where, timeout_s)
        async with asyncio.timeout(timeout_s):
            addresses = await NAMES.addresses(url.host, url.port) if where is None else (where,)
            return await _open_one_of(addresses, url, timeout_s, worker_ca)
    except ConnectionRefusedError as error:
        raise Refused(f"{url} refused the connection") from error
    except TimeoutError as error:
        raise ConnectTimeout(f"{url} did not take the connection within {timeout_s:g} s") from error
    except ssl.SSLError as error:
        raise NotOpened(f"{url} could not be trusted or spoken to over TLS: {error}") from error
    except OSError as error:  # no route, no such name
        if error.errno in OWN_SHORTAGE and not isinstance(error, socket.gaierror):
            remedy = "raise `ulimit -n`, or lower --router-max-connections"
            raise Exhausted(f"the router could open no connection to {url}: {error}; {remedy}") from error
        raise NotOpened(f"{url} could not be reached: {error}") from error


async def _open_one_of(addresses: Sequence[Address], url: WorkerUrl, timeout_s: float, worker_ca: str) -> Connection:
    context = worker_context(worker_ca) if url.scheme == "https" else None
    failure: OSError | NotOpened = OSError("it has no address")
    for where in addresses:
        if reason := refused_address(where.address[0]):  # the name leads there
            failure = NotOpened(f"{url} could not be reached: {reason}")
            continue
        try:
            return await _open_at(where, timeout_s, context, url.host if context is not None else None)
        except OSError as error:
            failure = error
    raise failure


async def _open_at(
    where: Address, timeout_s: float, context: ssl.SSLContext | None = None, name: str | None = None
) -> Connection:
    """Half the cost of the loop's own way, which matters when a crowd comes: nearby workers take it at once."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(where.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        keep_watch(sock)
        if (code := sock.connect_ex(where.address)) not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        if not _is_connected(sock):
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, where.address)
        _, connection = await loop.create_connection(Connection, sock=sock, ssl=context, server_hostname=name)
    except BaseException:
        sock.close()
        raise
    return connection


@functools.lru_cache(maxsize=4096)
def ip_of(url: WorkerUrl) -> Address | None:
    """The address that a URL's host is; None: it is a name."""
    try:
        ip = ipaddress.ip_address(url.host)
    except ValueError:
        return None
    return Address(socket.AF_INET if ip.version == 4 else socket.AF_INET6, (str(ip), url.port))


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


class Connections:
    """The unused connections to one worker."""

    def __init__(self, url: WorkerUrl, *, connect_timeout_s: float, idle_s: float, worker_ca: str = "") -> None:
        self._url = url
        self._connect_timeout_s = connect_timeout_s
        self._worker_ca = worker_ca
        self.idle_s = idle_s
        """How long one is kept."""
        self.proven_s = 0.0
        """How long the worker was seen to leave an unused one open."""
        self.host = url.netloc.encode("ascii")
        """For Host headers."""
        self._unused: list[Connection] = []
        self._closed = False

    def take(self, *, idempotent: bool) -> Connection | None:
        """A connection that was used before and may be used again; None: one has to be opened.

        idempotent: the request may be sent twice, so that nothing is lost with a connection that the worker is just
        closing. Others get none that was unused for more than half of what the worker is known to bear.
        """
        while self._unused:
            connection = self._unused.pop()
            idle_s = time.monotonic() - connection.idle_since
            if idle_s > self.idle_s:  # the newest is last: all are too old
                self._close_all((connection, *self._unused))
                self._unused = []
            elif idle_s <= FIRST_TRUST_S:
                connection.idle_s = idle_s
                return connection
            elif connection.has_ended():  # which may have come unread, on a busy event loop
                self._close_all((connection,))
                self._keep_shorter(idle_s)
            elif idempotent or idle_s <= self.proven_s / 2:
                connection.idle_s = idle_s
                return connection
            else:
                self.proven_s = max(self.proven_s, idle_s)
                self._unused.append(connection)
                return None
        return None

    async def open(self) -> Connection:
        """A fresh connection. Raises NotOpened."""
        return await open_connection(self._url, timeout_s=self._connect_timeout_s, worker_ca=self._worker_ca)

    def put(self, connection: Connection, now: float) -> None:
        """Keep a connection whose exchange is over, or close it if no other can follow."""
        if self._closed or not connection.reusable:
            connection.close()
            return
        connection.finish()
        connection.idle_since = now
        connection.on_idle_end = self._ended_unused
        self._unused.append(connection)

    def drop_old(self) -> None:
        """Close what was unused for too long. The newest is last and is taken first, so that a burst's rest ages."""
        now = time.monotonic()
        if self._unused:  # whose end would have been told
            self.proven_s = max(self.proven_s, now - self._unused[0].idle_since)
        limit = now - self.idle_s
        keep = [c for c in self._unused if c.idle_since >= limit]
        if len(keep) != len(self._unused):
            self._close_all(c for c in self._unused if c.idle_since < limit)
            self._unused = keep

    def close(self) -> None:
        """Close the unused ones, and later each that comes back."""
        self._closed = True
        self._close_all(self._unused)
        self._unused = []

    def _ended_unused(self, connection: Connection) -> None:
        """The worker closed an unused connection: from now on they are kept half as long as that one lasted."""
        with contextlib.suppress(ValueError):
            self._unused.remove(connection)
        self._keep_shorter(time.monotonic() - connection.idle_since)

    def distrust(self, connection: Connection) -> None:
        """A connection that had been unused ended as it was used again: the worker may have been closing it."""
        self._keep_shorter(connection.idle_s)

    def _keep_shorter(self, seen_s: float) -> None:
        self.idle_s = min(self.idle_s, seen_s / 2)
        self.proven_s = min(self.proven_s, seen_s)

    @staticmethod
    def _close_all(connections: Iterable[Connection]) -> None:
        for connection in connections:
            connection.on_idle_end = None
            connection.close()
