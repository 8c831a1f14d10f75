"""A sink in one line, for people. Pure."""

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
    return said
