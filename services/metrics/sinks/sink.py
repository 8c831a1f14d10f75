"""What a sink is: it takes rows (or batches of records) in order. How it is driven stands in task.py.

A sink never knows of another, and never decides on retries: it raises, and is started again.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.jsonline import NO_SECRETS, Secrets
from furlong.rundir import RunDir
from furlong.sinks import Refused
from services.metrics.rows import RowReader

__all__ = ["Cursor", "Refused", "Sink", "SinkContext", "SinkSpec", "TakenInPart", "option_of"]

Item = TypeVar("Item")
Option = TypeVar("Option")


@dataclass(frozen=True)
class Cursor:
    """How far a sink is."""

    row_id: int
    """The last row (or batch) that is safe there, whatever is killed."""
    position: int = 0
    """Its own: for a file, the byte after the row."""
    refused: tuple[Refused, ...] = ()
    """Of one write: rows that were left out, the others were taken."""


class TakenInPart(Exception):
    """A write took the first of its items and then failed, for what this is raised from: those are not sent again."""

    def __init__(self, cursor: Cursor) -> None:
        """cursor: the last item that was taken, with those before it that were refused."""
        super().__init__(f"taken up to row {cursor.row_id}")
        self.cursor = cursor


class Sink(abc.ABC, Generic[Item]):
    """Each call has a limit; one that is passed is cancelled, and `abort` called. Subclasses set `name` and limits."""

    name: str
    start_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    finish_timeout_s: float = 10.0
    lagging_after_s: float = 10.0
    """Seconds behind after which it is said to lag."""
    counts_safe: bool = False
    """Whether a row counts as taken only when it is safe, not when it was handed over."""
    trouble: str = ""
    """Why what was taken does not get on, when the sink knows and goes on trying by itself. Empty: it does."""
    num_left_out: int = 0
    """Values or log records of what was taken that the other side has no place for."""
    cursor_name: str = ""
    """Under which its cursor is kept. Empty: its name."""
    idle_after_s: float | None = None
    """Start only when there is something to take, finish after so many seconds without. None: always started."""
    gather_s: float = 5.0
    """How long rows gather after a write before the next one; the first after a pause waits for nothing."""
    tick_s: float | None = None
    """How often `tick` is called, between two writes. None: never."""

    @abc.abstractmethod
    async def start(self, durable: Cursor) -> Cursor:
        """Get ready; the cursor to go on from. May be called again after a failure or `finish`."""

    @abc.abstractmethod
    async def write(self, rows: Sequence[Item]) -> Cursor:
        """Take rows; up to where they are safe if the sink were killed now.

        Raises Refused for one row that will never be taken (all before it are taken, none after it), TakenInPart when
        the first of them were taken for good and the others were not; anything else has the same rows sent again.
        """

    async def tick(self) -> Cursor | None:
        """Look after what was taken; a newer cursor, if there is one."""
        return None

    @abc.abstractmethod
    async def finish(self) -> Cursor | None:
        """No more rows will come: complete what is written. The final cursor; None: as it was."""

    @abc.abstractmethod
    async def abort(self) -> None:
        """Let go of everything, after a failure."""


@dataclass(frozen=True)
class SinkSpec:
    """A sink that somebody wants, by a flag or while the service runs."""

    name: str
    kind: str
    options: Mapping[str, object] = field(default_factory=dict)
    live: bool = False
    """Added while the service runs; kept in the store."""


@dataclass(frozen=True)
class SinkContext:
    """What a sink is made with, beside its options."""

    name: str
    """The sink's."""
    run_dir: RunDir
    folder: Path
    """Its own, durable; made when it is first asked for. Removed with the sink."""
    log_path: Path
    """For what its process writes to stdout and stderr, if it has one."""
    drain_budget_s: float
    reader: RowReader
    secrets: Secrets = NO_SECRETS
    run: str | None = None
    """The one run that it takes. None: all."""
    run_config: Mapping[str, object] | None = None
    """The resolved configuration of that run, without secrets. None: not known."""
    live: bool = False
    """Asked for over HTTP."""
    memory_bytes: int = 0
    """Limit of its process. 0: none."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, option: str, value: object, rule: str, remedy: str = "") -> ConfigError:
        """The error for an option that cannot be."""
        return ConfigError([Problem(f"sinks.{self.name}.{option}", value, rule, remedy)])

    def path(self, option: str, given: str) -> Path:
        """A path among the options. One that was asked for over HTTP must lie in the run directory."""
        path = Path(given)
        if not self.live:
            return path
        root = self.run_dir.root.resolve()
        inside = (root / path).resolve()
        if not inside.is_relative_to(root):
            raise self.refuse(option, given, f"must lie in {self.run_dir.root}", "A flag may name any path.")
        first = inside.relative_to(root).parts[:1]
        if first and first[0] in _KEPT:
            raise self.refuse(option, given, "must not lie in what the run itself keeps", "Name another place.")
        return inside


def option_of(
    options: Mapping[str, object], context: SinkContext, name: str, kind: type[Option], default: Option | None = None
) -> Option:
    """One option, of the type that it must have. Raises ConfigError; default None: it must be given."""
    value = options.get(name, default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if value is None:
        raise context.refuse(name, None, "must be given", f"Add the option {name}.")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise context.refuse(name, value, f"must be a {_WORDS.get(kind, kind.__name__)}, got {type(value).__name__}")
    return value


_KEPT = frozenset(
    {"addresses.json", "alerts.jsonl", "checkpoints", "config.toml", "logs", "metrics", "metrics.jsonl", "rollout"}
    | {"spool", "traces"}
)
"""In a run directory: what services own, where nothing that is asked for over HTTP may write."""
_WORDS: dict[type, str] = {str: "text", int: "whole number", float: "number", bool: "true or false"}
