"""What a run left in its spools reaches a shared metrics service."""

from pathlib import Path

from furlong.handover import hand_over
from furlong.records import Last
from furlong.spool import waiting
from furlong.telemetry import Telemetry
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
        assert hand_over(folder, service.address, timeout_s=20) >= 600
        assert waiting(folder) == {}
        assert hand_over(folder, service.address, timeout_s=20) == 0
        until(lambda: {row["step"] for row in service.rows()} == set(range(1, 301)), "300 steps")
    finally:
        service.end()


def test_service_that_is_away_leaves_them_where_they_are(tmp_path: Path) -> None:
    left = Telemetry(run="r", service="x", instance="rollout", find_address=lambda: None, spool_folder=tmp_path)
    left.record({"event": "x"})
    left.close(0.1)
    found = waiting(tmp_path)
    assert hand_over(tmp_path, "127.0.0.1:1", timeout_s=2) == 0
    assert found and waiting(tmp_path) == found
