"""Reads the file of an offline wandb run: a header, then LevelDB's log format holding protobuf records."""

import importlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # Any: what a run's own JSON holds

_BLOCK_BYTES = 32 * 1024
_FRAME = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4


@dataclass
class OfflineRun:
    """What one file says."""

    run_id: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    """Each with its axis; wandb's own keys (`_step`, ...) left out."""
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
    for content in _records(path.read_bytes()):
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
        elif kind == "exit":
            run.finished = True
    return run


def _records(content: bytes) -> Iterator[bytes]:
    identity, magic, _ = struct.unpack("<4sHB", content[:7])
    assert (identity, magic) == (b":W&B", 0xBEE1), "not a wandb file"
    at, parts = 7, b""
    while at + _FRAME.size <= len(content):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _FRAME.size:
            at += left
            continue
        _, length, kind = _FRAME.unpack_from(content, at)
        if kind == 0 and length == 0:  # padding
            at += left
            continue
        body = content[at + _FRAME.size : at + _FRAME.size + length]
        at += _FRAME.size + length
        parts = body if kind in (_WHOLE, _FIRST) else parts + body
        if kind in (_WHOLE, _LAST):
            yield parts
