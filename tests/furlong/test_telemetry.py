"""Telemetry without a service: bounds, drops, the spool, forks. With one: tests/metrics."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from furlong.recordqueue import Priority, Record, RecordQueue
from furlong.records import Last
from furlong.spool import Batch, Spool, left_over
from furlong.telemetry import Telemetry

Make = Callable[..., Telemetry]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes telemetry that finds no service."""
    made: list[Telemetry] = []

    def make_one(**options: Any) -> Telemetry:
        given: dict[str, Any] = {"find_address": lambda: None, "spool_folder": tmp_path, "instance": "x-0", **options}
        made.append(Telemetry(run="r", service="s", **given))
        return made[-1]

    yield make_one
    for telemetry in made:
        telemetry.close(0.1)


def spooled(folder: Path) -> list[dict[str, Any]]:
    """All records left in a spool, but the word that the process ended; it is taken over."""
    return [record for record in spooled_all(folder) if record["event"] != "heartbeat"]


def spooled_all(folder: Path) -> list[dict[str, Any]]:
    found = []
    for spool in left_over(folder):
        while batch := spool.read(max_records=100, max_bytes=1 << 20):
            found += [orjson.loads(record.body) for record in batch.records if record.body]
        spool.release()
    return found


def say(telemetry: Telemetry, step: int) -> None:
    telemetry.metrics("train/step", step, {"train/loss": Last(step)}, part="t", parts=["t"], rollout_id=1)


def test_metrics_record_says_what_the_contract_says(make: Make, tmp_path: Path) -> None:
    telemetry = make()
    telemetry.attempt = 3
    say(telemetry, 5)
    assert not telemetry.close(1.0)
    (record,) = spooled(tmp_path)
    assert record.pop("ts").endswith("Z")
    identity = {"run": "r", "service": "s", "instance": "x-0", "level": "info", "event": "metrics"}
    row = {"axis": "train/step", "step": 5, "attempt": 3, "part": "t", "parts": ["t"], "rollout_id": 1}
    assert record == {**identity, **row, "values": {"train/loss": ["last", 5]}}


@pytest.mark.parametrize(
    "arguments",
    [("no/axis", 1, {}), ("train/step", "x", {}), ("train/step", None, {}), ("train/step", 1, None), (None, 1, 3)],
)
def test_wrong_arguments_never_raise(make: Make, arguments: tuple[Any, Any, Any]) -> None:
    telemetry = make()
    telemetry.metrics(*arguments, part="t", parts=["t"])
    telemetry.metrics(*arguments, part=None, parts=None)  # type: ignore[arg-type]
    telemetry.record(arguments)  # type: ignore[arg-type]
    telemetry.record({1: object(), "x": float("nan")})  # type: ignore[dict-item]
    assert telemetry.stats.num_taken == 1


def test_close_and_flush_are_bounded_when_the_service_is_away(make: Make) -> None:
    telemetry = make()
    say(telemetry, 1)
    began = time.monotonic()
    assert not telemetry.flush(0.2)
    assert not telemetry.close(30.0)
    assert time.monotonic() - began < 5.0
    num_taken = telemetry.stats.num_taken
    say(telemetry, 2)
    assert not telemetry.flush(0.1)
    assert not telemetry.close(1.0)
    assert telemetry.stats.num_taken == num_taken


def test_address_that_cannot_be_reached_is_no_error(make: Make, tmp_path: Path) -> None:
    for number, address in enumerate(["127.0.0.1:1", "not an address", "[::::]:x", ""]):
        telemetry = make(find_address=lambda address=address: address, instance=f"a{number}-0")
        say(telemetry, number)
        assert not telemetry.flush(0.3)
        assert not telemetry.close(1.0)
    assert sorted(record["step"] for record in spooled(tmp_path)) == [0, 1, 2, 3]


def test_full_queue_drops_logs_before_warnings_before_metrics() -> None:
    queue = RecordQueue(max_records=3, max_bytes=1000)
    for body, priority in [(b"m1", 2), (b"l1", 0), (b"w1", 1), (b"l2", 0), (b"m2", 2), (b"m3", 2), (b"w2", 1)]:
        queue.put(body, Priority(priority))
    assert [record.body for record in queue.take(max_records=9, max_bytes=999)] == [b"m1", b"m2", b"m3"]
    assert queue.num_dropped == [2, 2, 0]


def test_queue_is_bounded_in_bytes() -> None:
    queue = RecordQueue(max_records=100, max_bytes=10)
    for number in range(5):
        queue.put(b"%d234" % number, Priority.LOG)
    queue.put(b"x" * 11, Priority.METRICS)
    assert [record.body for record in queue.take(max_records=9, max_bytes=999)] == []
    assert queue.num_dropped == [5, 0, 1]


def test_spool_is_bounded_and_keeps_metrics_longest(make: Make, tmp_path: Path) -> None:
    telemetry = make(spool_bytes=200_000)
    for step in range(300):
        say(telemetry, step)
        for _ in range(10):
            telemetry.ship(b'{"event": "log", "text": "%s"}' % (b"x" * 100), 20)
    telemetry.close(1.0)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.spool")) <= 200_000
    found = spooled(tmp_path)
    assert [record["step"] for record in found if record["event"] == "metrics"] == list(range(300))
    stats = telemetry.stats
    assert stats.num_dropped_logs == 3000 - (len(found) - 300) > 0
    assert (stats.num_dropped_metrics, stats.num_dropped_warnings) == (0, 0)


def batch(first: int, *bodies: bytes, priority: Priority = Priority.METRICS) -> Batch:
    return Batch("r/x-0", 7, first, tuple(Record(priority, body) for body in bodies))


def new_spool(folder: Path, max_bytes: int = 1 << 20) -> Spool:
    return Spool(folder, "x-0", producer="r/x-0", incarnation=7, max_bytes=max_bytes)


def read_all(spool: Spool) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    while taken := spool.read(max_records=3, max_bytes=1 << 20):
        found += [(number, r.body) for number, r in enumerate(taken.records, taken.first_sequence)]
    return found


def test_spool_of_more_than_a_million_files_is_read_in_their_order(tmp_path: Path) -> None:
    spool = new_spool(tmp_path)
    for number, file in ((1, 999_999), (2, 1_000_000)):
        spool._end_segment()
        spool._next_number = file
        spool.append(batch(number, b"x%d" % number))
    spool.release()
    (left,) = left_over(tmp_path)
    assert read_all(left) == [(1, b"x1"), (2, b"x2")]


def test_spool_gives_back_what_was_put_under_its_numbers(tmp_path: Path) -> None:
    spool = new_spool(tmp_path)
    spool.append(batch(5, b"a", b"b"))
    spool.append(batch(7, b"c"))
    assert read_all(spool) == [(5, b"a"), (6, b"b"), (7, b"c")]
    spool.append(batch(8, b"d"))
    spool.rewind()
    assert read_all(spool) == [(5, b"a"), (6, b"b"), (7, b"c"), (8, b"d")]
    spool.acknowledge(8)
    assert list(tmp_path.iterdir()) == []


def test_spool_that_somebody_holds_is_not_taken_over(tmp_path: Path) -> None:
    spool = new_spool(tmp_path)
    spool.append(batch(1, b"a"))
    assert left_over(tmp_path) == []
    spool.release()
    (taken,) = left_over(tmp_path)
    assert (taken.producer, taken.incarnation) == ("r/x-0", 7)
    assert left_over(tmp_path) == []
    assert left_over(tmp_path, instance="x") == []
    taken.release()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "garbage"])
def test_damaged_spool_gives_what_is_whole_and_is_kept(tmp_path: Path, damage: str) -> None:
    spool = new_spool(tmp_path)
    spool.append(batch(1, b"first" * 10))
    spool.append(batch(2, b"second" * 10))
    spool.release()
    (path,) = tmp_path.glob("*.spool")
    content = path.read_bytes()
    changed = {
        "cut": content[:-7],
        "flip": content[:-7] + b"\xff" + content[-6:],
        "empty": b"",
        "garbage": os.urandom(500),
    }[damage]
    path.write_bytes(changed)
    found = [item for taken in left_over(tmp_path) for item in read_all(taken)]
    assert found == ([(1, b"first" * 10)] if damage in ("cut", "flip") else [])
    (kept,) = tmp_path.glob("*.damaged")
    assert kept.read_bytes() == changed


@pytest.mark.parametrize("at", range(17))
def test_damage_in_a_frames_head_never_raises_and_makes_up_no_numbers(tmp_path: Path, at: int) -> None:
    spool = new_spool(tmp_path)
    spool.append(batch(1, b"first" * 10))
    (path,) = tmp_path.glob("*.spool")
    start = path.stat().st_size
    spool.append(batch(2, b"second" * 10))
    spool.release()
    content = bytearray(path.read_bytes())
    content[start + at] ^= 0xFF
    path.write_bytes(content)
    (taken,) = left_over(tmp_path)
    assert read_all(taken)[0] == (1, b"first" * 10)
    assert len(read_all(taken)) <= 1
    taken.release()


def test_what_is_no_spool_stands_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "a-5.000000.spool").mkdir()
    (tmp_path / f"a-{10**20}.000000.spool").write_bytes(b"furlong-spool-1 {}\n")
    (tmp_path / "b-6.000000.spool").write_bytes(b'furlong-spool-1 {"producer":5}\n')
    spool = new_spool(tmp_path)
    spool.append(batch(1, b"a"))
    spool.release()
    (taken,) = left_over(tmp_path)
    assert read_all(taken) == [(1, b"a")]
    taken.release()


def test_full_spool_leaves_the_numbers_of_what_it_dropped(tmp_path: Path) -> None:
    spool = new_spool(tmp_path, max_bytes=8192)
    for number in range(1, 101):
        priority = Priority.METRICS if number % 10 == 0 else Priority.LOG
        spool.append(batch(number, b"x" * 200, priority=priority))
    found = read_all(spool)
    assert [number for number, _ in found] == list(range(1, 101))
    assert [number for number, body in found if body and number % 10 == 0] == list(range(10, 101, 10))
    assert spool.num_dropped[Priority.LOG] == sum(not body for _, body in found) > 0
    assert spool.size_bytes <= 8192


def test_disk_that_takes_nothing_keeps_records_in_memory(make: Make, tmp_path: Path) -> None:
    telemetry = make(spool_folder=tmp_path / "missing", queue_records=10)
    for step in range(30):
        say(telemetry, step)
    assert not telemetry.close(1.0)
    assert telemetry.stats.num_dropped_metrics > 0
    assert "spool" in telemetry.stats.last_error


def test_forked_child_records_for_itself(make: Make, tmp_path: Path) -> None:
    telemetry = make()
    say(telemetry, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        say(telemetry, 2)
        telemetry.close(2.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (of_child,) = left_over(tmp_path)  # the parent's own is not there yet, or held
    assert [orjson.loads(body)["step"] for _, body in read_all(of_child)] == [2]
    of_child.acknowledge(1)
    telemetry.close(0.5)
    assert [record["step"] for record in spooled(tmp_path)] == [1]


def test_records_of_a_process_that_just_ends_are_in_the_spool(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        telemetry = Telemetry(run="r", service="s", instance="y-0", find_address=lambda: None, spool_folder=tmp_path)
        say(telemetry, 9)
        deadline = time.monotonic() + 10
        while not telemetry.stats.spooled_bytes and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [record["step"] for record in spooled(tmp_path)] == [9]


def test_secret_in_a_name_or_value_is_not_sent(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "SECRET123")
    telemetry = make()
    telemetry.record({"event": "x", "text": "SECRET123"})
    telemetry.metrics("train/step", 1, {"train/SECRET123": Last(1)}, part="t", parts=["t"])
    telemetry.close(1.0)
    assert b"SECRET123" not in b"".join(path.read_bytes() for path in tmp_path.glob("*.spool"))
    assert len(spooled(tmp_path)) == 2
