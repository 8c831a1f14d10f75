"""`furlong status`: what of a run is up, as a table or as JSON."""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from furlong.cli.asking import Asked, locate, read_command, refuse_words, told_errors
from furlong.cli.sink_lines import endpoint_line, file_line, sink_line
from furlong.cli.status_url import look_at_url, run_line
from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.launch.look import InstanceStatus, RunStatus, look_at
from furlong.rundir import RunDir

HELP = """usage: furlong status (--run-dir DIR | --url URL) [--json]

Show what of a run is up: pid, uptime, addresses, rollout, policy version, phase, engines, last checkpoint, last row.
With --url, for example http://127.0.0.1:8660: how that metrics service is, its sinks and its runs.
Exits 0 when all is up, 1 otherwise, 2 when DIR is not a run directory, 5 when the service at URL does not answer.
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
    asked = read_command(arguments, options=(), switches=("json",))
    refuse_words(asked)
    if "url" in asked.options:
        return _of_url(asked)
    if "run-dir" not in asked.options:
        raise ConfigError([Problem("--run-dir", "", "must be given", "Use --run-dir DIR, or --url URL.")])
    found = look_at(RunDir(Path(asked.options["run-dir"])))
    _print(found, asked, {})
    return 0 if found.all_up() else 1


def _of_url(asked: Asked) -> int:
    with told_errors() as code:
        client = locate(asked)().client
        assert client is not None
        found, runs = look_at_url(client)
        _print(found, asked, {"runs": runs})
        if "json" not in asked.switches:
            print("\n".join(map(run_line, runs)) if runs else "no run yet")
    return code[0] if code else 0


def _print(found: RunStatus, asked: Asked, more: Mapping[str, object]) -> None:
    if "json" in asked.switches:
        tree = {**asdict(found), **more, "all_up": found.all_up()}
        print(orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode())
    else:
        print(as_table(found, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def as_table(found: RunStatus, *, width: int | None) -> str:
    """For people. width: columns of their terminal; None: as wide as it needs to be."""
    if not found.run:
        where = f"at {found.run_dir}" if "://" in found.run_dir else f"of no run in {found.run_dir}"
        return "\n".join(
            [f"{found.instances[0].instance} service {where}", *_table(found.instances, width), *_sinks(found)]
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
