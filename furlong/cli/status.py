"""`furlong status`: what of a run is up, as a table or as JSON."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from furlong.cli.arguments import take_options
from furlong.cli.sink_lines import endpoint_line, file_line, sink_line
from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.launch.look import InstanceStatus, RunStatus, look_at
from furlong.rundir import RunDir

HELP = """usage: furlong status --run-dir DIR [--json]

Show what of a run is up: pid, uptime, addresses, rollout, policy version, phase, engines, last checkpoint, last row.
Exits 0 when all is up, 1 otherwise, 2 when DIR is not a run directory.
"""
COLUMNS = ("instance", "state", "pid", "uptime", "grpc", "http", "says")
LINES = {"sinks": sink_line, "files": file_line, "endpoints": endpoint_line}
"""What of an instance has lines of its own."""
ROW_KEYS = ("rollout/raw_reward", "perf/step_time")


def status(arguments: Sequence[str]) -> int:
    """Print it. Raises ConfigError when there is no run in the directory."""
    if "-h" in arguments or "--help" in arguments:
        print(HELP, end="")
        return 0
    taken = take_options(arguments, ("run-dir",))
    unknown = [word for word in taken.rest if word != "--json"]
    if unknown or "run-dir" not in taken.options:
        key, value, rule = "--run-dir", "", "must be given"
        if unknown:
            key, value, rule = "arguments", " ".join(unknown), "is not what this command takes"
        raise ConfigError([Problem(key, value, rule, "Use --run-dir DIR [--json].")])
    found = look_at(RunDir(Path(taken.options["run-dir"])))
    if "--json" in taken.rest:
        print(orjson.dumps({**asdict(found), "all_up": found.all_up()}, option=orjson.OPT_INDENT_2).decode())
    else:
        print(as_table(found, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return 0 if found.all_up() else 1


def as_table(found: RunStatus, *, width: int | None) -> str:
    """For people. width: columns of their terminal; None: as wide as it needs to be."""
    if not found.run:
        return "\n".join(
            [f"metrics service of no run in {found.run_dir}", *_table(found.instances, width), *_sinks(found)]
        )
    watched = f"supervised by pid {found.supervised_by}" if found.supervised_by else "not supervised by `furlong up`"
    lines = [f"run {found.run} in {found.run_dir}, {watched}", *_table([*found.instances, *found.engines], width)]
    lines += _sinks(found)
    done = ", with which the run is done" if found.is_done() else ""
    lines.append(f"last checkpoint: {_or_none(found.last_checkpoint, 'after rollout ')}{done}")
    if found.last_row is None:
        return "\n".join([*lines, f"last row: {found.last_row_unknown or 'none'}"])
    shown = [f"{key} {value:.4g}" for key in ROW_KEYS if isinstance(value := found.last_row.get(key), float)]
    lines.append("last row: " + ", ".join([f"rollout {found.last_row['step']}", *shown]))
    return "\n".join(lines)


def _sinks(found: RunStatus) -> list[str]:
    """One line a sink, followed file and read endpoint of the metrics service."""
    lines = []
    for item in found.instances:
        for what, line in LINES.items():
            told = item.details.get(what, [])
            lines += [line(one) for one in told] if isinstance(told, list) else []
    return lines


def _table(items: Sequence[InstanceStatus], width: int | None) -> list[str]:
    """One line an instance; where that is too wide, what it says of itself stands below it."""
    rows = [COLUMNS, *(_cells(item) for item in items)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [_line(row, widths) for row in rows]
    if width is None or max(map(len, lines)) <= width:
        return lines
    narrow = [_line(COLUMNS[:-1], widths[:-1])]
    for row in rows[1:]:
        narrow.append(_line(row[:-1], widths[:-1]))
        narrow += textwrap.wrap(row[-1], max(width, 20), initial_indent="    ", subsequent_indent="    ")
    return narrow


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cells(item: InstanceStatus) -> tuple[str, ...]:
    says = " ".join(f"{key}={_flat(value)}" for key, value in item.details.items() if key not in LINES)
    pid = str(item.pid or "-")
    return (item.instance, item.state, pid, _duration(item.uptime_s), item.grpc or "-", item.http or "-", says)


def _flat(value: object) -> str:
    return ",".join(f"{k}:{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _duration(seconds: float | None) -> str:
    """For example `3 s`, `12 min`, `5.2 h`."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _or_none(value: object, prefix: str) -> str:
    return "none" if value is None else f"{prefix}{value}"
