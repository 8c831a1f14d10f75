"""Runs rank 0 of the trainer in this process against a fake rollout; only telemetry and stdout are caught."""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from furlong import records
from furlong.config import RunConfig
from furlong.process import ExitCode, StopSignal
from furlong.rundir import RunDir
from furlong.service import ServiceContext
from services.trainer.attempt import next_attempt
from services.trainer.checkpoint import Checkpoints
from services.trainer.leader import lead
from services.trainer.row_writer import RowWriter


@dataclass
class CaughtTelemetry:
    """What the trainer recorded."""

    attempt: int = 1
    rows: list[tuple[str, int, dict[str, float | None]]] = field(default_factory=list)
    parts: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)

    def metrics(
        self,
        axis: str,
        step: int,
        values: Mapping[str, records.Value],
        *,
        part: str,
        parts: Sequence[str],
        rollout_id: int | None = None,
    ) -> None:
        self.rows.append((axis, step, {name: records.reduce_value(value) for name, value in values.items()}))
        self.parts.append((axis, part, tuple(parts)))

    def record(self, obj: dict[str, object]) -> None: ...

    @property
    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(connected=True)

    def flush(self, timeout_s: float) -> bool:
        return True

    def of(self, axis: str) -> list[dict[str, float | None]]:
        return [values for name, _, values in self.rows if name == axis]


@dataclass(frozen=True)
class Run:
    """How a run went."""

    code: ExitCode
    output: str
    telemetry: CaughtTelemetry


def run_trainer(config: RunConfig, *, stop: StopSignal | None = None) -> Run:
    """Rank 0, from start to end."""
    run_dir = RunDir(_path(config)).create()
    telemetry: Any = CaughtTelemetry(attempt=next_attempt(run_dir))  # Any: stands in for Telemetry
    context = ServiceContext(config, run_dir, "trainer-0", telemetry, stop or StopSignal())
    reader, writer = os.pipe()
    rows = RowWriter(writer)
    checkpoints = Checkpoints(run_dir.checkpoints, keep=config.run.keep_checkpoints)
    try:
        code = lead(context, checkpoints, rows, begun=threading.Event())
    finally:
        rows.close(5.0)
        os.close(writer)
        with os.fdopen(reader) as file:
            output = file.read()
    return Run(code, output, telemetry)


def _path(config: RunConfig) -> Any:
    from pathlib import Path

    return Path(config.run.run_dir)
