"""`furlong query`: keys over steps, as a table or as JSON."""

import fnmatch
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence

import orjson

from furlong.asking.client import Refused
from furlong.asking.source import Source
from furlong.asking.store import Curve
from furlong.cli.arguments import whole_number
from furlong.cli.asking import read_command, source_of, tell, told_errors
from furlong.cli.lines import clean, number
from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.records import encode_number

DEFAULT_LAST = 20
HELP = f"""usage: furlong query KEY... (--run-dir DIR | --url URL) [--run R] [--attempt A] [--last N] [--json]

Show how keys went over the steps: one table for each run and axis, one column for each key. After a resume it is the
newest attempt at each step; --attempt shows an older one. Works on a run that has ended, too.

  KEY            for example train/loss; '*' and '?' stand for any letters: 'perf/*'. None: the keys there are
  --run-dir DIR  the run's directory
  --url URL      the metrics service, for example http://127.0.0.1:8660; shows every run that has the keys
  --run R        of this run only
  --attempt A    as that attempt had it
  --last N       the newest N steps ({DEFAULT_LAST}; with --json all)
  --json         one JSON object a key: run, axis, key, steps, attempts, values

Examples
  furlong query train/loss rollout/raw_reward --run-dir runs/arith
  furlong query 'perf/*' --run-dir runs/arith --last 5
  furlong query train/loss --run-dir runs/arith --json | jq .values[-1]

Exits 0; 2 when there is no such key or run, 5 when the service does not answer.
"""


def query(arguments: Sequence[str]) -> int:
    """Print it. Raises ConfigError."""
    if "-h" in arguments or "--help" in arguments:
        print(HELP, end="")
        return 0
    asked = read_command(arguments, options=("run", "attempt", "last"), switches=("json",))
    as_json = "json" in asked.switches
    last = whole_number(asked.options, "last")
    if last == 0:
        raise ConfigError([Problem("--last", 0, "must be at least 1")])
    attempt = whole_number(asked.options, "attempt")
    with told_errors() as code:
        source, run = source_of(asked)
        if not asked.words:
            keys = source.keys(run=run)
            if keys:
                print("\n".join(keys))
            else:
                tell("there is no key yet: no row has come")
        else:
            wanted = last if last is not None else (None if as_json else DEFAULT_LAST)
            curves = source.curves(_keys(source, asked.words, run), run=run, last=wanted, attempt=attempt)
            print("\n".join(_as_json(curves) if as_json else _tables(curves, last=wanted)))
        sys.stdout.flush()
    return code[0] if code else 0


def _keys(source: Source, words: Iterable[str], run: str | None) -> list[str]:
    """The keys that are meant, patterns put in full. Raises Refused."""
    keys: list[str] = []
    known: list[str] | None = None
    for word in words:
        if not set("*?[") & set(word):
            keys.append(word)
            continue
        known = source.keys(run=run) if known is None else known
        matching = fnmatch.filter(known, word)
        if not matching:
            raise Refused(f"no key matches {word!r}", "`furlong query` without a key lists them.")
        keys += matching
    return list(dict.fromkeys(keys))


def _as_json(curves: Iterable[Curve]) -> list[str]:
    lines = []
    for curve in curves:
        values = [encode_number(math.nan if value is None else value) for value in curve.values]
        tree = {"run": curve.run, "axis": curve.axis, "key": curve.key}
        tree |= {"steps": curve.steps, "attempts": curve.attempts, "values": values}
        lines.append(orjson.dumps(tree).decode())
    return lines


def _tables(curves: Sequence[Curve], *, last: int | None) -> list[str]:
    """One for each run and axis, right-aligned, with the steps in front."""
    groups: dict[tuple[str, str], list[Curve]] = defaultdict(list)
    for curve in curves:
        groups[curve.run, curve.axis].append(curve)
    lines: list[str] = []
    several_runs = len({run for run, _ in groups}) > 1
    for (run, axis), group in groups.items():
        if lines:
            lines.append("")
        if several_runs:
            lines.append(f"run {clean(run)}")
        lines += _table(axis, group, last=last)
    return lines


def _table(axis: str, curves: Sequence[Curve], *, last: int | None) -> list[str]:
    """The newest steps of all the keys: one that is seldom said has older points, but not the others' there."""
    by_step = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    attempts = {s: a for curve in curves for s, a in zip(curve.steps, curve.attempts, strict=True)}
    with_attempts = len(set(attempts.values())) > 1
    head = [axis, *(["attempt"] if with_attempts else []), *(curve.key for curve in curves)]
    rows = [[clean(title) for title in head]]
    for step in sorted(attempts)[-(last or 0) :]:
        cells = ["nan" if v is None else number(v) for v in (d.get(step, "-") for d in by_step)]
        rows.append([str(step), *([str(attempts[step])] if with_attempts else []), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
