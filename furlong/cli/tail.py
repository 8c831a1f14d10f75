"""`furlong tail`: log lines, rows and alerts of all services of a run, live, in the order of their time."""

import os
import queue
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from furlong.asking.filters import LogFilter
from furlong.asking.following import KINDS, Event, Place, Wanted
from furlong.asking.levels import NAMES, level_number
from furlong.asking.source import Found, Source
from furlong.asking.watching import Ended, Item, Note, Watcher
from furlong.cli.arguments import whole_number
from furlong.cli.asking import Asked, locate, read_command, refuse_words, tell, told_errors
from furlong.cli.lines import Style, alert_line, log_line, moment, row_line
from furlong.config import ConfigError
from furlong.config.errors import Problem

DEFAULT_LAST = 20
WINDOW_S = 0.06
"""What comes within it is put in order."""
MAX_WINDOW_ITEMS = 5_000
GONE_S = 15.0
"""How long a service that nothing supervises may be away."""
HELP = f"""usage: furlong tail (--run-dir DIR | --url URL) [filters] [--last N] [--no-follow] [--json]

Show log lines, rows and alerts of all services of a run as they come, in the order in which they were written. Goes on
through a restart of the metrics service without losing or repeating a line. Ctrl-C ends it. Of a run that has ended it
shows the last lines, from what was stored.

  --run-dir DIR   the run's directory
  --url URL       the metrics service, for example http://127.0.0.1:8660; shows all its runs
  --last N        begin with the last N ({DEFAULT_LAST}; 0: only what comes)
  --no-follow     only these, then end
  --json          one JSON object a line, as it was stored

Filters, all of which must fit
  --run R         of this run
  --service S     of this service: trainer, rollout, router, metrics, engine
  --instance I    of this instance: trainer-0, engine-1
  --level L       at least this level: debug, info (if not given), warning, error, critical
  --rollout N     of this rollout
  --text T        that hold this text, in letters of any case
  --rows          only rows
  --logs          only log lines

Examples
  furlong tail --run-dir runs/arith
  furlong tail --run-dir runs/arith --service engine --level warning --last 200
  furlong tail --url http://127.0.0.1:8660 --run mine --rows --json | jq .values

Exits 0 when the run has ended, 2 when it is not there, 5 when the service does not answer, 130 at Ctrl-C.
"""
OPTIONS = ("run", "service", "instance", "level", "rollout", "text", "last")
SWITCHES = ("no-follow", "json", "rows", "logs")


@dataclass(frozen=True)
class Shown:
    """How lines are printed."""

    style: Style
    as_json: bool
    with_run: bool


def tail(arguments: Sequence[str]) -> int:
    """Print until it ends. Raises ConfigError."""
    if "-h" in arguments or "--help" in arguments:
        print(HELP, end="")
        return 0
    asked = read_command(arguments, options=OPTIONS, switches=SWITCHES)
    refuse_words(asked)
    find, wanted = locate(asked), _wanted(asked)
    last = whole_number(asked.options, "last")
    try:
        with told_errors() as code:
            return _tail(asked, find, wanted, DEFAULT_LAST if last is None else last)
        return code[0]
    except KeyboardInterrupt:
        return 130


def _tail(asked: Asked, find: Callable[[], Found], wanted: Wanted, last: int) -> int:
    found = find()
    source = Source(found)
    run = wanted.lines.run or found.run
    wanted = replace(wanted, lines=replace(wanted.lines, run=run))
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    with_run = run is None and "url" in asked.options
    shown = Shown(Style(colours=colours), as_json="json" in asked.switches, with_run=with_run)
    if source.is_dead:
        tell("no metrics service runs here; this is read from what it has stored")
    place = source.place()
    _print(_history(source, wanted, place, last), shown)
    if source.is_dead or "no-follow" in asked.switches:
        return 0
    folder = asked.options.get("run-dir")
    watcher = Watcher(find, wanted, place, has_ended=_never if folder is None else _ended_in(Path(folder)))
    try:
        return _follow(watcher.start(), shown)
    finally:
        watcher.stop()


def _follow(watcher: Watcher, shown: Shown) -> int:
    ended: Ended | None = None
    while ended is None:
        window = _window(watcher.items)
        if window is None:
            return 0
        events = []
        for item in window:
            if isinstance(item, Note):
                tell(item.text)
            elif isinstance(item, Ended):
                ended = item
            else:
                events.append(item)
        _print(events, shown)
    if ended.error:
        tell(ended.error)
        return int(ended.code)
    tell("the run has ended")
    return 0


def _window(items: "queue.Queue[Item]") -> list[Item] | None:
    """What came within a short while; None: nobody reads what we print."""
    while True:
        try:
            window = [items.get(timeout=0.5)]
            break
        except queue.Empty:
            if _is_unread():
                return None
    until = time.monotonic() + WINDOW_S
    while len(window) < MAX_WINDOW_ITEMS and (left_s := until - time.monotonic()) > 0:
        try:
            window.append(items.get(timeout=left_s))
        except queue.Empty:
            break
    return window


def _is_unread() -> bool:
    """Whether the other end of the pipe that is our stdout is closed."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(sum(mask & (select.POLLERR | select.POLLNVAL) for _, mask in poll.poll(0)))
    except (OSError, ValueError):
        return False


def _history(source: Source, wanted: Wanted, place: Place, last: int) -> list[Event]:
    """The last events up to a place, of all kinds."""
    if not last:
        return []
    events: list[Event] = []
    if "record" in wanted.kinds:
        for line in source.logs(wanted.lines, last=last, before=place.record_id + 1):
            events.append(Event("record", place, orjson.dumps(line)))
    if "row" in wanted.kinds:
        for row in source.rows(run=wanted.lines.run, last=last):
            body = orjson.dumps(row)
            if row["id"] <= place.row_id and wanted.has_row(row["run"], body):
                events.append(Event("row", place, body))
    if "alert" in wanted.kinds:
        for alert in source.alerts(run=wanted.lines.run, firing=None, last=last):
            if alert["id"] <= place.alert_id:
                events.append(Event("alert", place, orjson.dumps(alert)))
    return sorted(events, key=_when)[-last:]


def _print(events: Sequence[Event], shown: Shown) -> None:
    lines = [_line(event, shown) for event in sorted(events, key=_when)]
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def _line(event: Event, shown: Shown) -> str:
    tree = orjson.loads(event.data)
    if event.kind == "record":
        if shown.as_json:
            return orjson.dumps(tree["record"]).decode()
        return log_line(tree["record"], tree["received"], shown.style, with_run=shown.with_run)
    if shown.as_json:
        return event.data.decode()
    return (row_line if event.kind == "row" else alert_line)(tree, shown.style, with_run=shown.with_run)


def _when(event: Event) -> float:
    tree = orjson.loads(event.data)
    if event.kind == "record":
        return moment(tree["record"], tree["received"])
    return moment({}, tree["emitted"]) if event.kind == "row" else float(tree.get("at_us", 0)) / 1e6


def _wanted(asked: Asked) -> Wanted:
    """Raises ConfigError."""
    options = asked.options
    level = options.get("level", "info")
    if level.lower() not in NAMES.values() and level_number(level) == level_number(None):
        raise ConfigError([Problem("--level", level, f"must be one of {', '.join(NAMES.values())}")])
    only = {kind for switch, kind in (("rows", "row"), ("logs", "record")) if switch in asked.switches}
    lines = LogFilter(
        options.get("run"),
        options.get("service"),
        options.get("instance"),
        level_number(level),
        whole_number(options, "rollout"),
        options.get("text"),
    )
    kinds = only or set(KINDS)
    if not only and (lines.service or lines.instance or lines.text or lines.rollout_id is not None):
        kinds.discard("alert")  # it is of no service, and asked for by its own command
    return Wanted(lines, frozenset(kinds))


def _never(away_s: float) -> bool:
    return False


def _ended_in(folder: Path) -> Callable[[float], bool]:
    """A run that nothing supervises has ended when its service stays away."""

    def has_ended(away_s: float) -> bool:
        from furlong.launch.lock import is_locked
        from furlong.rundir import RunDir

        return not is_locked(RunDir(folder)) and (away_s > GONE_S or (folder / "up.json").exists())

    return has_ended
