"""A metrics service as a process of its own, and a producer that speaks its protocol by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import orjson

from furlong import addresses, rpc
from furlong.config import RunConfig
from furlong.config.sections import MetricsSection, RunSection
from furlong.rundir import RunDir
from furlong.telemetry import Telemetry
from furlong.v1 import metrics_pb2, metrics_pb2_grpc

LIMIT_S = 20.0
NAME = "furlong.v1.Metrics"


def until(condition: Callable[[], object], what: str, *, limit_s: float = LIMIT_S) -> None:
    """Wait for something that another process does. Fails naming it."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.02)


class MetricsProcess:
    """One run directory and, while it is started, the service's process."""

    def __init__(self, root: Path, *, environment: dict[str, str] | None = None, **metrics: object) -> None:
        self.run_dir = RunDir(root / "run").create()
        self.config = RunConfig(
            run=RunSection(name="r", run_dir=str(self.run_dir.root), drain_budget_s=12),
            metrics=MetricsSection.model_validate(metrics),
        )
        self._config_path = root / "config.json"
        self._config_path.write_text(self.config.model_dump_json())
        self._environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "MetricsProcess":
        """Start it and wait until it is SERVING."""
        return self.begin().wait_serving()

    def begin(self) -> "MetricsProcess":
        """Start it."""
        command = [sys.executable, "-m", "tests.metrics.serve", str(self._config_path)]
        with (self.run_dir.root / "stderr").open("ab") as stderr:
            self.process = subprocess.Popen(command, env=self._environment, stderr=stderr, cwd=Path.cwd())
        return self

    def wait_serving(self) -> "MetricsProcess":
        """Wait until it is SERVING. Fails with what it said when it ended."""
        assert self.process is not None
        until(lambda: self.process and (self.process.poll() is not None or self._serves()), "the service SERVING")
        assert self.process.poll() is None, (self.run_dir.root / "stderr").read_text()
        return self

    def _serves(self) -> bool:
        entry = addresses.find(self.run_dir, "metrics")
        if entry is None or self.process is None or entry.pid != self.process.pid:
            return False
        return rpc.is_serving(entry.grpc or "", NAME)

    @property
    def address(self) -> str:
        entry = addresses.find(self.run_dir, "metrics")
        assert entry is not None and entry.grpc is not None
        return entry.grpc

    @property
    def http(self) -> str:
        entry = addresses.find(self.run_dir, "metrics")
        assert entry is not None and entry.http is not None
        return entry.http

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(LIMIT_S)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(LIMIT_S)

    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; each must be JSON."""
        if not self.run_dir.metrics_rows.exists():
            return []
        return [json.loads(line) for line in self.run_dir.metrics_rows.read_text().splitlines()]

    def rows_of(self, step: int) -> list[dict[str, Any]]:
        """What was handed on of one step."""
        return [row for row in self.rows() if row["step"] == step]

    def wait_row(self, step: int) -> dict[str, Any]:
        until(lambda: self.rows_of(step), f"a row of step {step} in metrics.jsonl")
        return self.rows_of(step)[0]

    def wait_rows(self, count: int) -> list[dict[str, Any]]:
        until(lambda: len(self.rows()) >= count, f"{count} rows in metrics.jsonl, there are {len(self.rows())}")
        return self.rows()

    def stub(self) -> metrics_pb2_grpc.MetricsStub:
        return metrics_pb2_grpc.MetricsStub(rpc.channel(self.address))

    def flush(self) -> None:
        self.stub().Flush(metrics_pb2.FlushRequest(), timeout=LIMIT_S)

    def status(self) -> metrics_pb2.GetMetricsStatusResponse:
        return self.stub().GetStatus(metrics_pb2.GetMetricsStatusRequest(), timeout=LIMIT_S)

    def telemetry(self, instance: str = "trainer-0") -> Telemetry:
        return Telemetry.for_run(self.config, self.run_dir, service="trainer", instance=instance)


def batch(
    bodies: Iterable[bytes], *, first: int = 1, producer: str = "r/x-0", incarnation: int = 1
) -> metrics_pb2.RecordBatch:
    """A batch as a producer sends it."""
    return metrics_pb2.RecordBatch(
        producer=producer, incarnation=incarnation, first_sequence=first, records=list(bodies)
    )


def send(service: MetricsProcess, *batches: metrics_pb2.RecordBatch) -> list[metrics_pb2.IngestAck]:
    """Send batches on one stream; their acknowledgements."""
    return list(service.stub().Ingest(iter(batches), timeout=LIMIT_S))


def part(
    step: int,
    values: dict[str, object],
    *,
    axis: str = "train/step",
    attempt: int = 1,
    part: str = "trainer",
    parts: Sequence[str] = ("trainer",),
    **more: object,
) -> bytes:
    """A metrics record."""
    record = {"event": "metrics", "run": "r", "axis": axis, "step": step, "attempt": attempt}
    return orjson.dumps({**record, "part": part, "parts": list(parts), "values": values, **more})


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    assert isinstance(error, grpc.Call)
    return error.code()
