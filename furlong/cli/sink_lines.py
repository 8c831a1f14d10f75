"""A sink, a followed file or a read endpoint in one line, for people. Pure."""

from collections.abc import Mapping
from typing import Any  # Any: a sink's state as JSON

MAX_WHY_CHARS = 200


def sink_line(sink: Mapping[str, Any]) -> str:
    """For example `sink wandb: lagging by 120 rows, 34 s` or `sink x: failing because ...: 3 rows, 12 s behind`."""
    state, rows = sink["state"], int(sink["num_rows_behind"])
    place = f"{rows} row{'' if rows == 1 else 's'}, {float(sink['seconds_behind']):.0f} s"
    said = f"sink {sink['name']}: {state}"
    if state == "lagging":
        said += f" by {place}"
    elif state in ("failing", "starting") and (sink["last_error"] or rows):
        why = " ".join(str(sink["last_error"]).split())
        why = why if len(why) <= MAX_WHY_CHARS else why[:MAX_WHY_CHARS] + "..."
        said += (f" because {why}" if why else "") + (f": {place} behind" if rows else "")
    if refused := int(sink["num_rows_refused"]):
        said += f"; {refused} row{'' if refused == 1 else 's'} refused and left out"
    if left_out := int(sink["num_values_left_out"]):
        said += f"; {left_out} value{'' if left_out == 1 else 's'} left out"
    return said


_ODD_LINES = {
    "num_clipped": "too long and cut",
    "num_invalid": "not UTF-8",
    "num_welded": "of several objects or torn",
    "num_partial": "handed on before their end",
}


def file_line(file: Mapping[str, Any]) -> str:
    """For example `file x.log: 1200 lines, 34.5 KiB behind; 2 not UTF-8; cut or written anew 1 time`."""
    behind = int(file["behind_bytes"])
    place = f"{behind / 1024:.1f} KiB behind" if behind else "all read"
    said = f"file {file['path']}: {_counted(int(file['num_lines']), 'line')}, {place}"
    said += "".join(f"; {file[name]} {what}" for name, what in _ODD_LINES.items() if int(file[name]))
    times = int(file["num_truncations"])
    return said + (f"; cut or written anew {_counted(times, 'time')}" if times else "")


def endpoint_line(endpoint: Mapping[str, Any]) -> str:
    """For example `endpoint engine-0 URL: 12 readings` or `...: failing because ...; 12 readings, 3 failures`."""
    said = f"endpoint {endpoint['instance']} {endpoint['url']}: "
    if endpoint["last_error"]:
        said += f"failing because {' '.join(str(endpoint['last_error']).split())[:MAX_WHY_CHARS]}; "
    said += _counted(int(endpoint["num_readings"]), "reading")
    failures = int(endpoint["num_failures"])
    return said + (f", {_counted(failures, 'failure')}" if failures else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
