"""`furlong query`: keys over steps, as a table or as JSON."""

import fnmatch
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import orjson

from furlong.asking.client import Refused
from furlong.asking.source import Source
from furlong.asking.store import Curve
from furlong.cli import objects
from furlong.cli.arguments import whole_number
from furlong.cli.asking import read_command, source_of, tell, told_errors
from furlong.cli.lines import clean, number
from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.records import encode_number

DEFAULT_LAST = 20
HELP = f"""usage: furlong query KEY... (--run-dir DIR | --url URL) [--run R] [--attempt A] [--last N] [--json]

Show how keys went over the steps: one table for each run and axis, one column for each key. After a resume it is the
newest attempt at each step; --attempt shows an older one. A histogram is shown as count, range and mean of each step,
a table as its first rows. Works on a run that has ended, too.

  KEY            for example train/loss; '*' and '?' stand for any letters: 'perf/*'. None: the keys there are
  --run-dir DIR  the run's directory
  --url URL      the metrics service, for example http://127.0.0.1:8660; shows every run that has the keys
  --run R        of this run only
  --attempt A    as that attempt had it
  --last N       the newest N steps ({DEFAULT_LAST}, of a table 1; with --json all)
  --json         one JSON object a key: run, axis, key, steps, attempts, values; of histograms and tables also kind,
                 and the values whole

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
            keys = sorted({*source.keys(run=run), *source.object_keys(run=run)})
            if keys:
                print("\n".join(keys))
            else:
                tell("there is no key yet: no row has come")
        else:
            print("\n".join(_answer(source, asked.words, run, last=last, attempt=attempt, as_json=as_json)))
        sys.stdout.flush()
    return code[0] if code else 0


def _answer(
    source: Source, words: Sequence[str], run: str | None, *, last: int | None, attempt: int | None, as_json: bool
) -> list[str]:
    """The lines to print. Raises Refused."""
    keys = _keys(source, words, run)
    wanted = last if last is not None else (None if as_json else DEFAULT_LAST)
    curves = source.curves(keys.numbers, run=run, last=wanted, attempt=attempt) if keys.numbers else []
    found = source.objects(keys.objects, run=run, last=wanted, attempt=attempt) if keys.objects else []
    if as_json:
        return [*_as_json(curves), *objects.as_json(found)]
    lines = _tables(curves, last=wanted)
    return [*lines, *([""] if lines and found else []), *objects.as_text(found, last=last)]


@dataclass(frozen=True)
class _Keys:
    """Those that are meant."""

    numbers: list[str]
    objects: list[str]
    """Histograms and tables."""


def _keys(source: Source, words: Iterable[str], run: str | None) -> _Keys:
    """The keys that are meant, patterns put in full. Raises Refused."""
    known = source.keys(run=run)
    named = [word for word in words if not set("*?[") & set(word)]
    patterns = [word for word in words if word not in named]
    others = source.object_keys(run=run) if patterns or not set(named) <= set(known) else []
    numbers, whole = [], []
    for word in words:
        matching = fnmatch.filter([*known, *others], word) if word in patterns else [word]
        if not matching:
            raise Refused(f"no key matches {word!r}", "`furlong query` without a key lists them.")
        whole += [key for key in matching if key in others]
        numbers += [key for key in matching if key in known or key not in others]
    return _Keys(list(dict.fromkeys(numbers)), list(dict.fromkeys(whole)))


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
    rows = [head]
    for step in sorted(attempts)[-(last or 0) :]:
        cells = ["nan" if v is None else number(v) for v in (d.get(step, "-") for d in by_step)]
        rows.append([str(step), *([str(attempts[step])] if with_attempts else []), *cells])
    return objects.aligned(rows)
