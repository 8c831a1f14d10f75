"""Signs of life: who is told, when, and of what; and the word at the end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from furlong.spool import left_over
from furlong.telemetry import Telemetry
from tests.furlong.fake_metrics import FakeMetrics


@pytest.fixture
def service() -> Iterator[FakeMetrics]:
    fake = FakeMetrics()
    yield fake
    fake.close()


def producer(folder: Path, address: str | None, **options: Any) -> Telemetry:
    options = {"run": "r", "service": "s", "instance": "x-0", "spool_folder": folder, **options}
    return Telemetry(find_address=lambda: address, **options)


def test_process_that_says_nothing_shows_that_it_lives(service: FakeMetrics, tmp_path: Path) -> None:
    telemetry = producer(tmp_path, service.address, heartbeat_s=0.1, queue_records=4)
    for number in range(500):
        telemetry.ship(b'{"event":"log","n":%d}' % number, 20)
    service.wait_for(lambda: len(service.said("heartbeat")) >= 2, "two heartbeats")
    beat = service.said("heartbeat")[-1]
    assert (beat["instance"], beat["level"], beat["every_s"]) == ("x-0", "debug", 0.1)
    assert beat["num_dropped"]["logs"] == telemetry.stats.num_dropped_logs > 0
    assert "closing" not in beat
    telemetry.close(5.0)


def test_last_word_says_that_the_end_is_meant(service: FakeMetrics, tmp_path: Path) -> None:
    telemetry = producer(tmp_path, service.address)
    telemetry.record({"event": "x"})
    assert telemetry.close(10.0)
    assert [record["event"] for record in service.records] == ["x", "heartbeat"]
    assert service.records[-1]["closing"] is True
    assert not telemetry.close(1.0)


def test_process_that_records_nothing_is_not_heard_of(service: FakeMetrics, tmp_path: Path) -> None:
    telemetry = producer(tmp_path, service.address, heartbeat_s=0.01)
    telemetry.close(1.0)
    assert (service.records, telemetry.stats.num_taken) == ([], 0)


def test_service_that_is_away_is_owed_no_heartbeats(tmp_path: Path) -> None:
    telemetry = producer(tmp_path, None, heartbeat_s=0.01)
    telemetry.record({"event": "x"})
    assert not telemetry.flush(0.7)  # some turns of the thread
    assert telemetry.stats.num_taken == 1
    telemetry.close(1.0)
    assert telemetry.stats.num_taken == 2


def test_forked_child_speaks_for_no_process_but_itself(tmp_path: Path) -> None:
    telemetry = producer(tmp_path, None)
    telemetry.record({"event": "x"})
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        telemetry.record({"event": "y"})
        telemetry.close(2.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (of_child,) = left_over(tmp_path)
    batch = of_child.read(max_records=10, max_bytes=1 << 20)
    assert batch is not None and len(batch.records) == 1
    of_child.release()
    telemetry.close(0.5)
