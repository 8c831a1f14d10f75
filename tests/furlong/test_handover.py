"""What a run left in its spools reaches a shared metrics service."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from furlong.handover import hand_over
from furlong.records import Last
from furlong.spool import waiting
from furlong.telemetry import Telemetry
from furlong.v1 import metrics_pb2_grpc
from tests.metrics.running import MetricsProcess, until


def test_spools_of_an_ended_run_reach_a_shared_service_once(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    for instance in ("rollout", "trainer-0"):
        left = Telemetry(run="r", service="x", instance=instance, find_address=lambda: None, spool_folder=folder)
        for step in range(1, 301):
            left.metrics("train/step", step, {f"train/{instance}": Last(step)}, part=instance, parts=[instance])
        left.close(0.1)
    assert sum(waiting(folder).values()) >= 600
    service = MetricsProcess(tmp_path).start()
    try:
        assert hand_over(folder, service.address, timeout_s=20) == ""
        assert waiting(folder) == {}
        assert hand_over(folder, service.address, timeout_s=20) == ""
        until(lambda: {row["step"] for row in service.rows()} == set(range(1, 301)), "300 steps")
    finally:
        service.end()


def test_service_that_is_away_leaves_them_where_they_are(tmp_path: Path) -> None:
    left = Telemetry(run="r", service="x", instance="rollout", find_address=lambda: None, spool_folder=tmp_path)
    left.record({"event": "x"})
    left.close(0.1)
    found = waiting(tmp_path)
    assert "UNAVAILABLE" in hand_over(tmp_path, "127.0.0.1:1", timeout_s=2)
    assert found and waiting(tmp_path) == found


class SilentService(metrics_pb2_grpc.MetricsServicer):
    """Ends every stream well, and takes nothing."""

    def __init__(self) -> None:
        self.num_batches = 0

    def Ingest(self, request_iterator: Iterator[object], context: object) -> Iterator[object]:  # type: ignore[override]
        self.num_batches += len(list(request_iterator))
        return iter(())


def test_nothing_is_sent_after_what_was_not_acknowledged(tmp_path: Path) -> None:
    left = Telemetry(run="r", service="x", instance="rollout", find_address=lambda: None, spool_folder=tmp_path)
    for number in range(3_000):
        left.record({"event": "x", "n": number})
    left.close(5.0)
    found, silent = waiting(tmp_path), SilentService()  # type: ignore[abstract]
    server = grpc.server(ThreadPoolExecutor(1))
    metrics_pb2_grpc.add_MetricsServicer_to_server(silent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert "without an acknowledgement" in hand_over(tmp_path, f"127.0.0.1:{port}", timeout_s=10)
    finally:
        server.stop(0).wait(5)
    assert silent.num_batches == 1 and waiting(tmp_path) == found
