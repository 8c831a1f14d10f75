"""Gauges by UDP: right signs, names told apart, small packets, a daemon that is away costs nothing."""

import math
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from services.metrics.rows import Row
from services.metrics.sinks import names, statsd
from services.metrics.sinks.drawn import Drawn
from services.metrics.sinks.names import Names
from services.metrics.sinks.sink import Cursor
from services.metrics.sinks.statsd import MAX_PACKET_BYTES, Newest, StatsdSink, fold_name, gauge, packets
from tests import tools
from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.sinks.everything import statsd_gauges, statsd_serving

Make = Callable[..., MetricsProcess]


class Daemon:
    """Follows statsd's rules for gauges."""

    def __init__(self) -> None:
        self.gauges: dict[str, float] = {}
        self.largest_packet = 0

    def take(self, packet: bytes) -> None:
        self.largest_packet = max(self.largest_packet, len(packet))
        for line in packet.decode().splitlines():
            name, _, rest = line.partition(":")
            number, kind = rest.split("|")
            assert kind == "g"
            before = self.gauges.get(name, 0.0) if number[0] in "+-" else 0.0
            self.gauges[name] = before + float(number)


@contextmanager
def listening() -> Generator[tuple[str, Callable[[], Daemon]]]:
    """An address, and what the daemon there knows now."""
    daemon = Daemon()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024 * 1024)
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)

        def now() -> Daemon:
            while True:
                try:
                    daemon.take(listener.recv(65536))
                except BlockingIOError:
                    return daemon

        yield f"127.0.0.1:{listener.getsockname()[1]}", now


def values(step: int, **named: float) -> bytes:
    return part(step, {name.replace("__", "/"): ["last", value] for name, value in named.items()})


def test_negative_gauges_are_set_and_not_subtracted(make: Make) -> None:
    with listening() as (addr, now):
        service = make(statsd_addr=addr, statsd_prefix="p").start()
        for step, value in enumerate((-1.0, -2.0), start=1):
            send(service, batch([values(step, train__loss=value)], first=step))
            until(lambda value=value: now().gauges.get("p.r.train.loss") == value, f"{value}")


def test_names_are_told_apart_and_nothing_that_is_no_number_is_sent(make: Make) -> None:
    named: dict[str, object] = {"eval/x-pass@4": ["last", 1], "eval/x-pass#4": ["last", 2], "eval/bad": ["last", "NaN"]}
    with listening() as (addr, now):
        service = make(statsd_addr=addr).start()
        send(service, batch([part(1, named)]))
        until(lambda: len(now().gauges) >= 3, "the gauges")
        found = now().gauges
        assert found.pop("furlong.r.eval.bad.nonfinite") == 1
        assert "furlong.r.eval.x-pass_4" in found
        assert {name[: len("furlong.r.eval.x-pass_4")] for name in found} == {"furlong.r.eval.x-pass_4"}
        assert sorted(found.values()) == [1, 2]


def test_key_on_two_axes_is_two_gauges(make: Make) -> None:
    with listening() as (addr, now):
        service = make(statsd_addr=addr).start()
        send(service, batch([part(1, {"loss": ["last", 1]})]))
        until(lambda: now().gauges == {"furlong.r.loss": 1}, "the first")
        send(service, batch([part(1, {"loss": ["last", 2]}, axis="eval/step")], first=2))
        until(lambda: len(now().gauges) == 2, "the second under a name of its own")
        assert now().gauges.pop("furlong.r.loss") == 1 and list(now().gauges.values()) == [2]


def test_many_values_are_sent_in_small_packets_and_only_the_newest(make: Make) -> None:
    with listening() as (addr, now):
        service = make(statsd_addr=addr).start()
        rows = [part(n, {f"train/metric_{i}": ["last", n] for i in range(200)}) for n in range(1, 101)]
        send(service, batch(rows))
        until(lambda: now().gauges.get("furlong.r.train.metric_199") == 100, "the newest value")
        assert set(now().gauges.values()) == {100}
        assert now().largest_packet <= MAX_PACKET_BYTES


def test_daemon_that_is_away_costs_nothing(make: Make) -> None:
    service = make(statsd_addr=f"127.0.0.1:{tools.free_port()}").start()
    for step in range(1, 4):
        send(service, batch([values(step, train__loss=1)], first=step))
        service.wait_row(step)
    until(lambda: {sink.name: sink.state for sink in service.status().sinks}["statsd"] == "healthy", "healthy")
    service.flush()
    assert service.stop() == 3


@pytest.mark.parametrize("number", [1e-300, 1e300, 1e-6, -1e-6, 123456789.125, 0.1, -0.0, 1e16])
def test_gauge_says_the_number_exactly(number: float) -> None:
    daemon = Daemon()
    line = gauge("x", number)
    assert line is not None and len(line) < MAX_PACKET_BYTES and b"e" not in line
    daemon.take(line)
    assert daemon.gauges == {"x": number}
    assert gauge("x", math.nan) is gauge("x", math.inf) is None


def test_lines_of_one_gauge_stay_in_one_packet() -> None:
    found = packets([gauge(f"a-rather-long-name-{n}", -float(n)) or b"" for n in range(1, 500)])
    assert all(len(packet) <= MAX_PACKET_BYTES for packet in found)
    assert all(packet.startswith(b"a-") and b":0|g" in packet.splitlines()[0] for packet in found)


def test_late_row_of_an_older_step_is_not_sent() -> None:
    newest, place = Newest(), ("r", "train/step", "a")
    row = lambda step, attempt=1: Drawn(step, "r", "train/step", step, attempt, 0, {"a": step}, {}, {})  # noqa: E731
    assert newest.take(row(5), 0.0) == {place: 5}
    assert newest.take(row(3), 0.0) == {}
    assert newest.take(row(3, 2), 0.0) == {place: 3}
    assert newest.of_live_runs(1.0) == {place: 3}
    assert newest.of_live_runs(statsd.RESEND_FOR_S + 1) == {}


async def test_daemon_that_started_anew_is_told_all_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statsd, "RESEND_S", 0.0)
    body = b'{"run":"r","axis":"train/step","step":1,"attempt":1,"values":{"a":5,"b":"NaN"}}'
    with listening() as (addr, now):
        sink = StatsdSink("127.0.0.1", int(addr.split(":")[1]), prefix="", names=Names(fold_name, max_chars=99))
        await sink.start(Cursor(0))
        await sink.write([Row(1, "r", body, None, True, 1)])
        assert now().gauges == {"r.a": 5}
        now().gauges.clear()
        await sink.tick()
        assert now().gauges == {"r.a": 5}
        assert sink.num_left_out == 1
        await sink.abort()


def test_names_stay_the_same_over_a_restart(tmp_path: Path) -> None:
    made = Names(fold_name, max_chars=40, kept_in=tmp_path / "x" / "names.json")
    raws = ["r\nx\na@b", "r\nx\na#b", "r.x\nx\na", "r_x\nx\na", "r\nx\n" + "long/" * 20, "r\ny\na@b", "r\nx\nk\ny"]
    first = [made.folded(raw) for raw in raws]
    made.save()
    again = Names(fold_name, max_chars=40, kept_in=tmp_path / "x" / "names.json")
    assert [again.folded(raw) for raw in reversed(raws)] == first[::-1]
    assert len(set(first)) == len(raws) and max(map(len, first)) <= 40


def test_names_of_a_new_run_are_plain_however_many_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MAX_KEPT", 4)
    made = Names(fold_name, max_chars=99, kept_in=tmp_path / "names.json")
    live = [made.folded("live\nx\na@b"), made.folded("live\nx\na#b")]
    for number in range(9):
        assert made.folded(f"r{number}\nx\nloss") == f"r{number}.loss"
        assert [made.folded("live\nx\na@b"), made.folded("live\nx\na#b")] == live  # used all the while
        made.save()
    assert len(set(live)) == 2 and len(orjson.loads((tmp_path / "names.json").read_bytes())) == 4


@pytest.mark.tools
def test_real_daemon_shows_the_values(make: Make, tmp_path: Path) -> None:
    with statsd_serving(tmp_path) as (port, admin):
        service = make(statsd_addr=f"127.0.0.1:{port}").start()
        for step, loss in enumerate((-1.0, -2.0, 1e-6, -0.25), start=1):
            send(service, batch([part(step, {"train/loss": ["last", loss], "eval/a@1": ["last", step]})], first=step))
            until(lambda loss=loss: (statsd_gauges(admin) or {}).get("furlong.r.train.loss") == loss, f"{loss} there")
        assert (statsd_gauges(admin) or {})["furlong.r.eval.a_1"] == 4
