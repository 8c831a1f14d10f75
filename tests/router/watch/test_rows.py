"""The router's rows on their way: through the metrics service to metrics.jsonl, and past the rules of alerts."""

import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from furlong import addresses
from furlong.alertrules.builtin import BUILT_IN
from furlong.process import ExitCode
from services.metrics.alerts.rowwatch import RowFacts
from services.metrics.alerts.runwatch import RunWatch
from services.router.watch.reporting import values_of
from services.router.watch.snapshot import merge
from tests.metrics.running import MetricsProcess, until
from tests.router.watch.passages import FakePassage, FakeWorker, FakeWorkers, observer_of

PROGRAM = """
import sys
from furlong.config import RunConfig
from services.router.main import main
sys.exit(main(RunConfig.model_validate_json(sys.argv[1]), rank=0, foreground=False))
"""


@pytest.fixture
def metrics(tmp_path: Path) -> Generator[MetricsProcess]:
    service = MetricsProcess(tmp_path).start()
    yield service
    service.end()


def test_last_row_of_a_router_that_is_stopped_stands_in_metrics_jsonl(metrics: MetricsProcess) -> None:
    router = subprocess.Popen([sys.executable, "-c", PROGRAM, metrics.config.model_dump_json()])
    try:
        until(lambda: addresses.find(metrics.run_dir, "router"), "the router")
        router.send_signal(signal.SIGTERM)
        assert router.wait(20) == ExitCode.DRAINED
    finally:
        router.kill()
    [row] = metrics.wait_rows(1)
    assert (row["axis"], row["complete"]) == ("router/time", True) and row["step"] > 1_700_000_000
    assert row["values"]["router/ready_workers"] == 0 and row["values"]["router/requests_per_s"] == 0


def test_rows_of_a_router_in_trouble_make_no_rule_of_training_fire() -> None:
    watch = RunWatch(BUILT_IN.values(), halt_on=frozenset())
    observer = observer_of()
    before = merge([observer.snapshot()])
    for step in range(200):
        observer.workers = FakeWorkers([FakeWorker()] if step % 2 else [], waiting=4000 * (step % 3))
        for _ in range(step):
            observer.finished(FakePassage(status=503, error="queue_full", ended=100.0 + 5 * step))
        after = merge([observer.snapshot()])
        values = values_of(before, after, seconds=10.0)
        before = after
        assert watch.take(RowFacts("r", "router/time", 1_700_000_000 + 10 * step, 1, values, step)) == []
