"""Where clients' connections come in: the primary accepts all of them and gives each to the process with the fewest.

The kernel's own sharing (SO_REUSEPORT) spreads by a hash: of 64 connections on two processes one has 35 as a rule and
41 now and then, what waits in the queue of a process that dies is lost, and a port that another program has is not
noticed. Giving one away costs 9 us. Here a connection
that was given away is kept open until its process says that it has it: if it dies before, another one gets it.
"""

import array
import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from services.router.http.server import Server
from services.router.processes.memory import SharedMemory

log = structlog.get_logger()

ACCEPTS_AT_ONCE = 64
STUCK_S = 0.5
"""A process that has not taken a connection for so long gets no more until it does."""
NO_FILES_PAUSE_S = 0.5
TAKEN = struct.Struct("=Q")
_FD_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)


@dataclass
class _Seat:
    """A secondary, as the door sees it."""

    sock: socket.socket
    num_given: int = 0
    num_taken: int = 0
    on_the_way: deque[tuple[float, socket.socket]] = field(default_factory=deque)
    """When each was given, and the connection."""

    def is_stuck(self) -> bool:
        """Whether it does not take what it is given."""
        return bool(self.on_the_way) and time.monotonic() - self.on_the_way[0][0] > STUCK_S


class Door:
    """The primary's side. Accepts while open."""

    def __init__(self, sock: socket.socket, server: Server, memory: SharedMemory) -> None:
        self._sock = sock
        self._server = server
        self._memory = memory
        self._seats: dict[int, _Seat] = {}
        self._adopting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        server.num_open = self.num_open
        self._loop.add_reader(sock, self._on_clients)

    def num_open(self) -> int:
        """Connections in all processes."""
        return self._num_here() + sum(self._num_at(column) for column in self._seats)

    def seat(self, column: int, sock: socket.socket) -> None:
        """A secondary takes connections from now on. sock: this end of the pair."""
        sock.setblocking(False)
        self._seats[column] = _Seat(sock)
        self._loop.add_reader(sock, self._on_taken, column)

    def unseat(self, column: int) -> None:
        """A secondary is no more, or stops: what it was given and has not taken goes to others."""
        seat = self._seats.get(column)
        if seat is None:
            return
        self._on_taken(column)  # what it said before it ended
        if self._seats.pop(column, None) is None:
            return
        self._loop.remove_reader(seat.sock)
        seat.sock.close()
        for _, client in seat.on_the_way:
            self._give(client)

    def close(self) -> None:
        """Accept no more."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _on_clients(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                client, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no more files: those that wait have to wait until some are closed
                log.error("accept_failed", error=str(error))
                self._loop.remove_reader(self._sock)
                self._again = self._loop.call_later(
                    NO_FILES_PAUSE_S, self._loop.add_reader, self._sock, self._on_clients
                )
                return
            client.setblocking(False)
            self._give(client)

    def _give(self, client: socket.socket) -> None:
        able = [column for column, seat in self._seats.items() if not seat.is_stuck()]
        by_load = sorted((self._num_at(column), column) for column in able)
        here = self._num_here()
        if self.num_open() < self._server.settings.max_connections:
            for number, column in by_load:
                if number > here:
                    break
                if self._send(self._seats[column], client):
                    return
        task = self._loop.create_task(self._server.adopt(client))
        self._adopting.add(task)
        task.add_done_callback(self._adopted)

    def _adopted(self, task: "asyncio.Task[None]") -> None:
        self._adopting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("connection_not_taken", error=repr(error))

    def _send(self, seat: _Seat, client: socket.socket) -> bool:
        rights = array.array("i", [client.fileno()])
        try:
            seat.sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError:  # it is full, or gone: the link will tell
            return False
        seat.num_given += 1
        seat.on_the_way.append((time.monotonic(), client))
        return True

    def _on_taken(self, column: int) -> None:
        seat = self._seats[column]
        while True:
            try:
                said = seat.sock.recv(TAKEN.size)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                said = b""
            if not said:
                self._loop.remove_reader(seat.sock)  # the link tells of its end
                return
            (num_taken,) = TAKEN.unpack(said)
            while seat.num_taken < num_taken and seat.on_the_way:
                seat.num_taken += 1
                seat.on_the_way.popleft()[1].close()

    def _num_here(self) -> int:
        return self._server.num_connections

    def _num_at(self, column: int) -> int:
        return self._seats[column].num_given - self._memory.closed(column)


class DoorEnd:
    """A secondary's side. Takes what it is given while open."""

    def __init__(self, sock: socket.socket, server: Server, memory: SharedMemory, *, column: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._server = server
        self._closed: Callable[[], None] = lambda: memory.add_closed(column)
        self._num_taken = 0
        self._adopting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        server.on_closed = self._closed
        self._loop.add_reader(sock, self._on_given)

    def close(self) -> None:
        """Take no more; what was given and not taken goes back with the end of this socket."""
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _on_given(self) -> None:
        taken: list[socket.socket] = []
        while len(taken) < ACCEPTS_AT_ONCE:
            try:
                said, rights, _, _ = self._sock.recvmsg(1, _FD_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                said, rights = b"", []
            if not said:
                self._loop.remove_reader(self._sock)  # the primary is gone, or gives no more
                break
            taken.extend(socket.socket(fileno=fd) for fd in _descriptors(rights))
        if not taken:
            return
        self._num_taken += len(taken)
        try:
            self._sock.send(TAKEN.pack(self._num_taken))  # before a byte of them is read
        except OSError as error:
            log.error("connections_not_acknowledged", error=str(error))
        for client in taken:
            task = self._loop.create_task(self._server.adopt(client))
            self._adopting.add(task)
            task.add_done_callback(self._adopted)

    def _adopted(self, task: "asyncio.Task[None]") -> None:
        self._adopting.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.debug("connection_not_taken", error=repr(error))
        self._closed()


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            found.extend(numbers)
    return found
