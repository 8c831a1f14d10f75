"""The service is killed, stopped, started again, finds a damaged store: nothing acknowledged is lost or doubled."""

import json
import signal
import sqlite3
import threading
import time
from collections.abc import Callable

import grpc
import pytest

from furlong.records import Last, Mean
from tests.metrics.running import MetricsProcess, batch, part, send, until

Make = Callable[..., MetricsProcess]


def steps_of(service: MetricsProcess) -> list[object]:
    return [row["step"] for row in service.rows()]


@pytest.mark.parametrize(
    "after", [40, pytest.param(1, marks=pytest.mark.slow), pytest.param(150, marks=pytest.mark.slow)]
)
def test_killed_in_a_burst_it_has_every_acknowledged_record_once(make: Make, after: int) -> None:
    service = make().start()
    batches = [batch([part(n, {"train/loss": ["last", n]})], first=n) for n in range(1, 401)]
    acked: list[int] = []
    killed = threading.Event()

    def burst() -> None:
        try:
            for ack in service.stub().Ingest(iter(batches), timeout=20):
                acked.append(ack.through_sequence)
                if ack.through_sequence >= after and not killed.is_set():
                    service.kill()
                    killed.set()
        except grpc.RpcError:
            pass

    thread = threading.Thread(target=burst)
    thread.start()
    assert killed.wait(20)
    thread.join(20)
    service.start()
    through = max(acked)
    send(service, *batches[through:])
    service.flush()
    assert steps_of(service) == list(range(1, 401))


def test_telemetry_bridges_a_kill_and_another_port(make: Make) -> None:
    service = make().start()
    telemetry = service.telemetry()
    for step in range(1, 301):
        telemetry.metrics("train/step", step, {"train/loss": Last(step)}, part="trainer", parts=["trainer"])
        if step == 100:
            assert telemetry.flush(10)
            service.kill()
        if step == 200:
            service.start()
    assert telemetry.flush(20)
    assert telemetry.close(5)
    service.flush()
    assert steps_of(service) == list(range(1, 301))


def test_calls_stay_fast_while_the_service_is_stopped_and_catch_up_after(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("furlong.shipper.STALL_S", 1.0)
    service = make().start()
    telemetry = service.telemetry()
    telemetry.record({"event": "first"})
    assert telemetry.flush(10)
    service.signal(signal.SIGSTOP)
    slowest = 0.0
    for step in range(1, 2001):
        began = time.perf_counter()
        telemetry.metrics("train/step", step, {"train/loss": Last(step)}, part="trainer", parts=["trainer"])
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 0.1
    assert not telemetry.flush(0.2)
    until(lambda: telemetry.stats.spooled_bytes > 0, "records in the spool")
    service.signal(signal.SIGCONT)
    assert telemetry.flush(20)
    telemetry.close(5)
    service.flush()
    assert steps_of(service) == list(range(1, 2001))


def test_order_holds_when_a_stopped_service_fills_queue_and_spool(make: Make) -> None:
    service = make(telemetry_queue_size=500).start()
    telemetry = service.telemetry()
    telemetry.record({"event": "first"})
    assert telemetry.flush(10)
    service.signal(signal.SIGSTOP)
    for step in range(1, 6001):
        telemetry.metrics("train/step", step, {"train/loss": Last(step)}, part="trainer", parts=["trainer"])
        if step % 200 == 0:
            until(lambda: telemetry.stats.num_waiting < 250, "room in the queue")
    assert telemetry.stats.num_dropped == 0
    service.signal(signal.SIGCONT)
    assert telemetry.flush(20)
    telemetry.close(5)
    service.flush()
    assert steps_of(service) == list(range(1, 6001))


def test_spool_of_a_dead_producer_is_collected_at_the_start(make: Make) -> None:
    service = make()
    telemetry = service.telemetry()
    telemetry.metrics("train/step", 1, {"train/loss": Last(3)}, part="trainer", parts=["trainer"])
    assert not telemetry.close(1.0)
    assert list(service.run_dir.spool.glob("*.spool"))
    service.start()
    assert service.wait_rows(1)[0]["values"] == {"train/loss": 3}
    until(lambda: not list(service.run_dir.spool.glob("*.spool")), "an empty spool")


def test_next_start_of_a_producer_delivers_what_its_last_left(make: Make) -> None:
    service = make()
    first = service.telemetry()
    first.metrics("train/step", 1, {"train/loss": Mean(3, 1)}, part="trainer", parts=["trainer"])
    first.close(0.5)
    service.start()
    second = service.telemetry()
    second.metrics("train/step", 2, {"train/loss": Mean(4, 1)}, part="trainer", parts=["trainer"])
    assert second.close(10)
    assert sorted(steps_of_when(service, 2)) == [1, 2]


def steps_of_when(service: MetricsProcess, count: int) -> list[int]:
    return [int(str(row["step"])) for row in service.wait_rows(count)]


def test_stop_hands_on_rows_that_wait_and_later_parts_amend_them(make: Make) -> None:
    service = make().start()
    axis, parts = "rollout/step", ["rollout", "trainer"]
    send(service, batch([part(0, {"perf/a": ["last", 1]}, axis=axis, part="rollout", parts=parts)]))
    assert service.stop() == 3  # drained
    assert [(row["complete"], "amends" in row) for row in service.rows()] == [(False, False)]
    service.start()
    send(service, batch([part(0, {"perf/b": ["last", 2]}, axis=axis, part="trainer", parts=parts)], first=2))
    row = service.wait_rows(2)[1]
    assert (row["complete"], row["amends"], row["values"]) == (True, True, {"perf/a": 1, "perf/b": 2})


def test_row_that_waits_too_long_is_handed_on_incomplete(make: Make) -> None:
    service = make(metrics_row_timeout_s=0.3).start()
    send(service, batch([part(0, {"train/a": ["last", 1]}, parts=["trainer", "other"])]))
    (row,) = service.wait_rows(1)
    assert row["complete"] is False


def test_row_that_waits_survives_a_kill(make: Make) -> None:
    service = make().start()
    send(service, batch([part(0, {"train/a": ["sum", 1]}, parts=["trainer", "other"])]))
    service.kill()
    service.start()
    send(service, batch([part(0, {"train/a": ["sum", 2]}, part="other", parts=["trainer", "other"])], first=2))
    (row,) = service.wait_rows(1)
    assert (row["complete"], row["values"]) == (True, {"train/a": 3})


SLOW = pytest.mark.slow


@pytest.mark.parametrize("damage", ["overwrite", pytest.param("cut", marks=SLOW), pytest.param("garbage", marks=SLOW)])
def test_damaged_store_is_set_aside_and_reported(make: Make, damage: str) -> None:
    service = make().start()
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(1, 201)]))
    service.flush()
    service.stop()
    path = service.run_dir.metrics_store / "metrics.db"
    content = path.read_bytes()
    size = len(content)
    damaged = {
        "overwrite": content[: size // 2] + b"\xaa" * 8192 + content[size // 2 + 8192 :],
        "cut": content[: size - 4096 - 7],
        "garbage": b"not a database" * 1000,
    }[damage]
    path.write_bytes(damaged)
    service.start()
    (aside,) = service.run_dir.metrics_store.glob("metrics.db.damaged-*Z")
    assert aside.stat().st_size == len(damaged)
    log = service.run_dir.log("metrics").read_text()
    assert any(json.loads(line)["event"] == "metrics_store_damaged" for line in log.splitlines())
    send(service, batch([part(999, {"train/loss": ["last", 1]})], producer="r/new"))
    service.flush()
    assert steps_of(service).count(999) == 1
    assert steps_of(service)[:200] == list(range(1, 201))


@pytest.mark.slow
def test_store_of_a_newer_version_is_refused_and_left_alone(make: Make) -> None:
    service = make().start()
    service.stop()
    path = service.run_dir.metrics_store / "metrics.db"
    with sqlite3.connect(path) as store:
        store.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(AssertionError, match="schema 99"):
        service.start()
    assert service.process is not None and service.process.returncode == 2
    assert not list(path.parent.glob("*.damaged*"))
