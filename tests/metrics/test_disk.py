"""A disk that is full, or fails: producers are told to hold, nothing acknowledged is lost, and it mends by itself."""

import contextlib
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import orjson
import psutil
import pytest

from benchmarks.loadclient import run_load
from furlong.records import Last
from tests.metrics.running import MetricsProcess, batch, code_of, part, send, until

Make = Callable[..., MetricsProcess]
MIB = 1024 * 1024
PAUSE = threading.Event()
LINE = orjson.dumps({"ts": "x", "event": "x", "run": "r", "text": "y" * 1000})


class SmallDisk:
    """A file system of its own under a folder; its size can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mount(self, size_bytes: int, *, again: bool = False) -> None:
        options = f"{'remount,' if again else ''}size={size_bytes}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    def end(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, timeout=10)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """For the store alone: spools and logs are elsewhere."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting needs root")
    folder = tmp_path / "run" / "metrics"
    folder.mkdir(parents=True)
    small = SmallDisk(folder)
    small.mount(16 * MIB)
    yield small
    small.end()


def fill_up(service: MetricsProcess, *, first: int = 1) -> tuple[int, grpc.StatusCode]:
    """Send until it is refused; the last record that was acknowledged, and how it was refused."""
    through = first - 1
    for _ in range(400):
        try:
            (ack,) = send(service, batch([LINE] * 100, first=through + 1, producer="r/filler"))
        except grpc.RpcError as error:
            return through, code_of(error)
        through = ack.through_sequence
    raise AssertionError("the disk never filled up")


def state(service: MetricsProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{service.http}/api/status", timeout=10) as answer:
        return dict(json.loads(answer.read()))


def is_ready(service: MetricsProcess) -> bool:
    try:
        with urllib.request.urlopen(f"{service.http}/readyz", timeout=10):
            return True
    except urllib.error.HTTPError:
        return False


def num_stored(service: MetricsProcess) -> int:
    return sum(
        int(n)
        for (n,) in _query(
            service,
            "SELECT num_records FROM batches b JOIN producers p ON p.id = b.producer_id WHERE p.producer = 'r/filler'",
        )
    )


def _query(service: MetricsProcess, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(service.run_dir.metrics_store / "metrics.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_full_disk_holds_records_off_and_takes_them_when_there_is_room(make: Make, disk: SmallDisk) -> None:
    service = make(metrics_min_free_bytes=4 * MIB).start()
    assert service.run_dir.metrics_store == disk.folder
    waiting = part(7, {"train/a": ["last", 1]}, parts=["trainer", "other"])
    send(service, batch([waiting]))
    through, code = fill_up(service)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert num_stored(service) == through
    assert "bytes free" in state(service)["holding"]
    assert not is_ready(service)
    telemetry = service.telemetry()
    for step in range(100, 120):
        telemetry.metrics("train/step", step, {"train/loss": Last(step)}, part="trainer", parts=["trainer"])
    assert not telemetry.flush(1.5)
    until(lambda: telemetry.stats.spooled_bytes > 0, "records in the producer's spool")
    disk.mount(64 * MIB, again=True)
    until(lambda: is_ready(service), "records taken again")
    assert telemetry.flush(20)
    telemetry.close(5)
    (ack,) = send(service, batch([LINE] * 100, first=through + 1, producer="r/filler"))
    assert ack.through_sequence == through + 100 == num_stored(service)
    service.flush()
    assert [row["step"] for row in service.rows()] == list(range(100, 120))


def test_rows_and_cursors_have_room_kept_for_them(make: Make, disk: SmallDisk) -> None:
    service = make(metrics_min_free_bytes=4 * MIB, metrics_row_timeout_s=2).start()
    send(service, batch([part(7, {"train/a": ["last", 1]}, parts=["trainer", "other"])]))
    fill_up(service)
    assert service.wait_row(7)["complete"] is False
    until(lambda: _query(service, "SELECT row_id FROM cursors WHERE sink = 'jsonl'") == [(1,)], "the sink's cursor")


def test_disk_that_is_full_to_the_last_byte_loses_nothing(make: Make, disk: SmallDisk) -> None:
    service = make(metrics_min_free_bytes=0).start()
    through, code = fill_up(service)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "full" in state(service)["store_error"]
    service.kill()
    (disk.folder / "rubbish").write_bytes(b"x" * (os.statvfs(disk.folder).f_bavail * os.statvfs(disk.folder).f_frsize))
    disk.mount(64 * MIB, again=True)
    service.start()
    assert num_stored(service) == through
    (ack,) = send(service, batch([LINE], first=through + 1, producer="r/filler"))
    assert ack.through_sequence == through + 1


def test_service_that_starts_on_a_full_disk_waits_for_room(make: Make, disk: SmallDisk) -> None:
    service = make().start()
    (ack,) = send(service, batch([LINE] * 100, producer="r/filler"))
    service.kill()
    (disk.folder / "metrics.db-shm").unlink(missing_ok=True)
    rubbish = disk.folder / "rubbish"
    with rubbish.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
    service.begin()
    until(
        lambda: "metrics_store_waits_for_disk" in service.run_dir.log("metrics").read_text(),
        "it says what it waits for",
    )
    rubbish.unlink()
    service.wait_serving()
    assert num_stored(service) == ack.through_sequence == 100


def test_disk_that_fails_is_told_and_mends_by_itself(make: Make) -> None:
    service = make().start()
    send(service, batch([LINE] * 100, producer="r/filler"))
    process = psutil.Process(service.process.pid if service.process else 0)
    process.rlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.RLIM_INFINITY))  # writes fail that are beyond it
    with pytest.raises(grpc.RpcError) as failed:
        for number in range(20):
            send(service, batch([LINE] * 100, first=101 + number * 100, producer="r/filler"))
    assert code_of(failed.value) == grpc.StatusCode.UNAVAILABLE
    assert not is_ready(service)
    stored = num_stored(service)
    process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (ack,) = send(service, batch([LINE], first=stored + 1, producer="r/filler"))
    assert ack.through_sequence == stored + 1
    assert is_ready(service)
    assert not list(service.run_dir.metrics_store.glob("*damaged*"))


def test_memory_stays_bounded_while_the_disk_is_slow(make: Make) -> None:
    """A commit that takes 2.5 s, in the middle of 200 producers that send what they can."""
    service = make().start()
    blocked = threading.Event()

    def block() -> None:
        with contextlib.closing(
            sqlite3.connect(service.run_dir.metrics_store / "metrics.db", isolation_level=None)
        ) as other:
            other.execute("PRAGMA busy_timeout = 5000")
            other.execute("BEGIN IMMEDIATE")
            blocked.set()
            PAUSE.wait(2.5)
            other.execute("ROLLBACK")

    thread = threading.Thread(target=block)
    thread.start()
    assert blocked.wait(10)
    taken = run_load(service.address, num_producers=200, batch_size=64, num_records=25_600, size_bytes=3000)
    thread.join(10)
    assert max(taken.latencies_s) > 1.0
    assert taken.num_records == 25_600
    assert psutil.Process(service.process.pid if service.process else 0).memory_info().rss < 300e6
