"""What the file of an offline wandb run says."""

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # Any: what a run's own JSON holds

from services.metrics.sinks.wandb_file import contents


@dataclass
class OfflineRun:
    """What one file says."""

    run_id: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    """Each with its axis; wandb's own keys (`_step`, ...) left out."""
    steps: list[int] = field(default_factory=list)
    """wandb's own step of each: the number of the row."""
    axes: dict[str, str] = field(default_factory=dict)
    """Pattern -> the axis it is drawn over."""
    finished: bool = False


def read_runs(folder: Path) -> list[OfflineRun]:
    """All offline runs below a folder, oldest first."""
    paths = sorted(folder.rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [read_run(path) for path in paths]


def read_run(path: Path) -> OfflineRun:
    """One file."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    run = OfflineRun()
    for content in contents(path):
        record = messages.Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id = record.run.run_id
            run.config.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
        elif kind == "metric" and record.metric.step_metric:
            run.axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif kind == "history":
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            run.points.append({name: value for name, value in items.items() if not name.startswith("_")})
            run.steps.append(record.history.step.num)
        elif kind == "exit":
            run.finished = True
    return run
