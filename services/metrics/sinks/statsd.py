"""The newest numbers as gauges of a statsd daemon, by UDP: PREFIX.RUN.KEY, with a KEY's slashes as dots.

statsd has neither steps nor times: of rows that come together only the newest value of each name is sent, and a row for
an older step than was sent changes nothing. UDP tells nobody of a loss, so newest values are sent again every half
minute while their run has rows: a daemon that was away, or started anew, has them within that time, and costs nothing
until then. A number that is not finite is not sent, as statsd has no such gauge; `num_left_out` counts them.

A gauge that begins with a sign is a change to statsd. A negative number is therefore sent as 0 and then as a change,
both in one packet.
"""

import asyncio
import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

import structlog

from furlong.addresses import join_host_port
from furlong.config.destinations import host_and_port
from services.metrics.rows import Row
from services.metrics.sinks.drawn import Drawn, drawn
from services.metrics.sinks.names import Names, folder_of
from services.metrics.sinks.sink import Cursor, Sink, SinkContext, option_of

log = structlog.get_logger()

MAX_PACKET_BYTES = 1_400
MAX_NAME_CHARS = 250
RESEND_S = 30.0
RESEND_FOR_S = 600.0
"""After a run's last row, its values are no longer sent again."""
MAX_GAUGES = 20_000
RESOLVE_S = 60.0

_fold = folder_of("A-Za-z0-9_.-")
_Place = tuple[str, str, str]
"""Run, axis and key: a key that stands on two axes is two gauges, of which the second has a mark behind its name."""


def make(options: Mapping[str, object], context: SinkContext) -> Sink[Row]:
    """Options: addr (HOST:PORT), prefix."""
    addr = option_of(options, context, "addr", str)
    if (found := host_and_port(addr)) is None:
        raise context.refuse("addr", addr, "must be HOST:PORT, for example 127.0.0.1:8125")
    prefix = option_of(options, context, "prefix", str, "furlong")
    names = Names(fold_name, max_chars=MAX_NAME_CHARS, kept_in=context.folder / "names.json")
    return StatsdSink(*found, prefix=prefix, names=names)


class StatsdSink(Sink[Row]):
    """Owns a socket and what the daemon should know."""

    gather_s = 1.0
    tick_s = 5.0
    start_timeout_s = 30.0

    def __init__(self, host: str, port: int, *, prefix: str, names: Names) -> None:
        self.num_left_out = 0
        """Numbers that were not finite. What is sent again is not counted again."""
        self._host, self._port, self._prefix = host, port, prefix
        self._names = names
        self._newest = Newest()
        self._socket: socket.socket | None = None
        self._resolved_at = 0.0
        self._sent_at = 0.0
        self._told_away = False

    async def start(self, durable: Cursor) -> Cursor:
        """Find the daemon's address. Raises OSError when its host has none."""
        await self._resolve()
        return durable

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Send what is newest in them."""
        changed: dict[_Place, float] = {}
        for row in rows:
            if (one := drawn(row)) is not None:
                changed |= self._newest.take(one, time.monotonic())
        self.num_left_out += sum(not math.isfinite(value) for value in changed.values())
        await self._send(changed)
        return Cursor(rows[-1].row_id)

    async def tick(self) -> Cursor | None:
        """Send everything again, now and then."""
        now = time.monotonic()
        if now - self._sent_at >= RESEND_S:
            self._sent_at = now
            await self._send(self._newest.of_live_runs(now))
        return None

    async def finish(self) -> Cursor | None:
        """Nothing waits."""
        await self.abort()
        return None

    async def abort(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _send(self, values: Mapping[_Place, float]) -> None:
        found = (gauge(self._name(place), value) for place, value in values.items())
        lines = [line for line in found if line is not None]
        await asyncio.to_thread(self._names.save)
        if time.monotonic() - self._resolved_at > RESOLVE_S:
            await self._resolve()
        for number, packet in enumerate(packets(lines)):
            self._put(packet)
            if number % 16 == 15:
                await asyncio.sleep(0)  # others' turn; and the daemon's buffer is small

    def _name(self, place: _Place) -> str:
        folded = self._names.folded("\n".join(place))
        return f"{self._prefix}.{folded}" if self._prefix else folded

    def _put(self, packet: bytes) -> None:
        try:
            if self._socket is not None:
                self._socket.send(packet)
        except OSError as error:  # nobody listens there, or the network is away: UDP promises no more
            if not self._told_away:
                where = join_host_port(self._host, self._port)
                log.warning("statsd_daemon_away", address=where, error=error.strerror or str(error))
            self._told_away = True

    async def _resolve(self) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        fresh = socket.socket(family, kind, protocol)
        fresh.setblocking(False)
        fresh.connect(address)
        await self.abort()
        self._socket, self._resolved_at = fresh, time.monotonic()


class Newest:
    """The newest value of each key of each axis of each run. Bounded."""

    def __init__(self) -> None:
        self._places: dict[_Place, tuple[int, int]] = {}
        self._values: dict[_Place, float] = {}
        self._seen_at: dict[str, float] = {}

    def take(self, row: Drawn, now: float) -> dict[_Place, float]:
        """What is new to the daemon."""
        changed = {}
        for key, value in row.values.items():
            place = (row.run, row.axis, key)
            if (row.attempt, row.step) < self._places.get(place, (row.attempt, row.step)):
                continue
            if place not in self._places and len(self._places) >= MAX_GAUGES:
                self._forget_oldest_run()
            self._places[place] = (row.attempt, row.step)
            changed[place] = value
        self._values |= changed
        self._seen_at[row.run] = now
        return changed

    def of_live_runs(self, now: float) -> dict[_Place, float]:
        """All values of runs that had a row of late."""
        live = {run for run, at in self._seen_at.items() if now - at <= RESEND_FOR_S}
        return {place: value for place, value in self._values.items() if place[0] in live}

    def _forget_oldest_run(self) -> None:
        oldest = min(self._seen_at, key=lambda run: self._seen_at[run], default="")
        self._seen_at.pop(oldest, None)
        self._places = {place: at for place, at in self._places.items() if place[0] != oldest}
        self._values = {place: value for place, value in self._values.items() if place[0] != oldest}


def fold_name(raw: str) -> str:
    """RUN, AXIS and KEY, parted by newlines, as statsd allows them: RUN without dots, KEY with dots for slashes."""
    run, _, key = raw.split("\n", 2)
    return f"{_fold(run).replace('.', '_')}.{_fold(key.replace('/', '.'))}"


def gauge(name: str, value: float) -> bytes | None:
    """The lines that set a gauge, which must stand in one packet. None: there is no gauge of such a number."""
    if not math.isfinite(value):
        return None
    digits = format(Decimal(repr(value)), "f")  # no exponent: not every daemon reads one
    if value < 0:
        return f"{name}:0|g\n{name}:{digits}|g".encode()
    return f"{name}:{digits.lstrip('-')}|g".encode()


def packets(lines: Iterable[bytes]) -> list[bytes]:
    """Lines in as few packets as they fit in."""
    found: list[bytes] = []
    for line in lines:
        if found and len(found[-1]) + 1 + len(line) <= MAX_PACKET_BYTES:
            found[-1] += b"\n" + line
        else:
            found.append(line)
    return found
