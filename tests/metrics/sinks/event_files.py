"""Reads event files as TensorBoard does: by TensorBoard's own classes, or by its rules written down here."""

import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # Any: messages that are made from descriptors

from tensorboardX.proto import event_pb2

from tests import tools

_events: Any = event_pb2

Curves = dict[str, list[tuple[int, float]]]
"""FOLDER/TAG -> its points in the order in which they are drawn."""

_SCRIPT = """
import json, sys
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
root, curves = Path(sys.argv[1]), {}
for folder in sorted({path.parent for path in root.rglob("*tfevents*")}):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    for tag in reader.Tags()["scalars"]:
        curves[f"{folder.relative_to(root)}/{tag}"] = [(e.step, repr(e.value)) for e in reader.Scalars(tag)]
print(json.dumps(curves))
"""


def by_tensorboard(root: Path) -> Curves:
    """Skips the test when there is no TensorBoard."""
    tool = tools.need("tensorboard")
    command = [str(tools.VENV / "bin/python"), "-c", _SCRIPT, str(root)]
    done = subprocess.run(command, env=tool.environment, capture_output=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    return {tag: [(step, float(value)) for step, value in points] for tag, points in found.items()}


def by_rule(root: Path) -> Curves:
    """Without it: events in the order of the files' names; a START purges the folder from its step on."""
    curves: Curves = {}
    for folder in sorted({path.parent for path in root.rglob("*tfevents*")}):
        prefix = f"{folder.relative_to(root)}/"
        for path in sorted(folder.glob("*tfevents*")):
            for event in _read(path):
                if event.HasField("session_log") and event.session_log.status == _events.SessionLog.START:
                    for tag in [tag for tag in curves if tag.startswith(prefix)]:
                        curves[tag] = [point for point in curves[tag] if point[0] < event.step]
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        curves.setdefault(prefix + value.tag, []).append((event.step, value.simple_value))
    return {tag: points for tag, points in curves.items() if points}


def _read(path: Path) -> Iterator[Any]:
    content, at = path.read_bytes(), 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        if at + 16 + length > len(content):
            return
        event = _events.Event()
        event.ParseFromString(content[at + 12 : at + 12 + length])
        yield event
        at += 16 + length
