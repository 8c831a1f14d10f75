"""A service that holds, a disk without room, a clock that was set back: what a producer keeps, drops and says."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from furlong.records import Last
from furlong.spool import Spool
from furlong.telemetry import Telemetry
from tests.furlong.fake_metrics import FakeMetrics

LINE = b'{"event":"log","text":"' + b"x" * 200 + b'"}'


@pytest.fixture
def service() -> Iterator[FakeMetrics]:
    fake = FakeMetrics()
    yield fake
    fake.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may mount no tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def producer(folder: Path, address: str | None, **options: Any) -> Telemetry:
    options = {"run": "r", "service": "s", "instance": "x-0", "spool_folder": folder, **options}
    return Telemetry(find_address=lambda: address, **options)


def say(telemetry: Telemetry, step: int) -> None:
    telemetry.metrics("train/step", step, {"train/loss": Last(step)}, part="t", parts=["t"])


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
def test_service_that_holds_is_asked_now_and_then_and_loses_nothing(
    service: FakeMetrics, tmp_path: Path, code: grpc.StatusCode
) -> None:
    service.holding = code
    telemetry = producer(tmp_path, service.address)
    began = time.monotonic()
    for step in range(5000):
        say(telemetry, step)
    service.wait_for(lambda: service.num_held >= 3, "three tries")
    assert service.num_held <= 4 + (time.monotonic() - began) / 0.05  # backing off, one batch a try
    service.holding = None
    assert telemetry.flush(20.0)
    assert [record["step"] for record in service.said("metrics")] == list(range(5000))
    assert telemetry.stats.num_dropped == 0
    telemetry.close(5.0)


def test_holding_service_is_not_flooded_at_each_try(service: FakeMetrics, tmp_path: Path) -> None:
    service.holding = grpc.StatusCode.RESOURCE_EXHAUSTED
    telemetry = producer(tmp_path, service.address)
    for _ in range(9000):
        telemetry.ship(LINE, 20)
    service.wait_for(lambda: service.num_held >= 4, "four tries")
    assert service.num_unasked == 0
    telemetry.close(1.0)


def test_beyond_the_bound_logs_go_first_and_are_counted_and_told(service: FakeMetrics, tmp_path: Path) -> None:
    service.holding = grpc.StatusCode.RESOURCE_EXHAUSTED
    telemetry = producer(tmp_path, service.address, queue_records=200, spool_bytes=100_000)
    for step in range(300):
        say(telemetry, step)
        for _ in range(10):
            telemetry.ship(LINE, 20)
        if step % 10 == 9:
            time.sleep(0.005)  # as a service has work between its lines
    service.holding = None
    assert telemetry.flush(20.0)
    stats = telemetry.stats
    assert (stats.num_dropped_metrics, stats.num_dropped_logs > 0) == (0, True)
    assert [record["step"] for record in service.said("metrics")] == list(range(300))
    assert len(service.said("log")) == 3000 - stats.num_dropped_logs
    service.wait_for(lambda: service.said("telemetry_dropped"), "the count of what was dropped")
    assert sum(told["num_logs"] for told in service.said("telemetry_dropped")) == stats.num_dropped_logs
    telemetry.close(5.0)


def test_spool_on_a_full_disk_keeps_records_in_memory_and_then_drops_logs(
    service: FakeMetrics, small_disk: Path
) -> None:
    (small_disk / "filler").write_bytes(b"x" * 200_000)
    service.holding = grpc.StatusCode.UNAVAILABLE
    telemetry = producer(small_disk, service.address, queue_records=500)
    for step in range(200):
        say(telemetry, step)
        for _ in range(20):
            telemetry.ship(LINE, 20)
    service.wait_for(lambda: service.num_held >= 2 and "spool" in telemetry.stats.last_error, "a full disk")
    (small_disk / "filler").unlink()
    service.holding = None
    assert telemetry.flush(20.0)
    stats = telemetry.stats
    assert (stats.num_dropped_metrics, stats.num_dropped_logs > 0) == (0, True)
    assert [record["step"] for record in service.said("metrics")] == list(range(200))
    assert len(service.said("log")) == 4000 - stats.num_dropped_logs
    telemetry.close(5.0)


def test_spool_in_a_read_only_place_costs_no_record_while_there_is_room_in_memory(
    service: FakeMetrics, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    service.holding = grpc.StatusCode.RESOURCE_EXHAUSTED
    telemetry = producer(small_disk, service.address)
    for step in range(3000):
        say(telemetry, step)
    service.wait_for(lambda: service.num_held >= 4, "four tries")
    service.holding = None
    assert telemetry.flush(20.0)
    assert [record["step"] for record in service.said("metrics")] == list(range(3000))
    assert telemetry.close(5.0)


RECORDER = """
import sys
from pathlib import Path
from tests.furlong.test_holding import producer, say
telemetry = producer(Path(sys.argv[1]), sys.argv[2])
for step in range(int(sys.argv[3]), int(sys.argv[3]) + 500):
    say(telemetry, step)
telemetry.close(20.0)
"""


def test_two_processes_of_one_name_lose_nothing_to_each_other(service: FakeMetrics, tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", RECORDER, str(tmp_path), service.address, first] for first in ("0", "500")]
    both = [subprocess.Popen(command) for command in commands]
    assert [process.wait(30) for process in both] == [0, 0]
    assert sorted(record["step"] for record in service.said("metrics")) == list(range(1000))
    assert len({incarnation for _, incarnation, _, _ in service.batches}) == 2


def start_number(folder: Path, clock: int) -> int:
    spool = Spool(folder, "x-0", producer="r/x-0", incarnation=clock, max_bytes=1 << 20)
    spool.ascend()
    return spool.incarnation


def test_starts_ascend_when_the_clock_is_set_back(tmp_path: Path) -> None:
    assert [start_number(tmp_path, clock) for clock in (1000, 2000, 500, 2000, 1, 3000)] == [
        1000,
        2000,
        2001,
        2002,
        2003,
        3000,
    ]


@pytest.mark.parametrize("content", [b"", b"garbage", b"-5", b"9" * 30, b"\xff\xfe", b"\xd9\xa3"])
def test_damaged_number_of_the_last_start_stands_in_nobodys_way(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x-0.incarnation").write_bytes(content)
    assert start_number(tmp_path, 1000) == 1000
    assert start_number(tmp_path, 1000) == 1001


def test_producer_whose_clock_was_set_back_numbers_above_its_last_start(service: FakeMetrics, tmp_path: Path) -> None:
    future = time.time_ns() // 1000 + 3_600_000_000
    assert start_number(tmp_path, future) == future
    telemetry = producer(tmp_path, service.address)
    say(telemetry, 1)
    assert telemetry.close(20.0)
    assert [incarnation for _, incarnation, _, _ in service.batches] == [future + 1]
