"""What a sink of your own is: a class named by `--metrics-sink pkg.mod.Class`. Owns the contract, and checks it.

Only `write` is needed; each method may be `async`. The class runs in a process of its own beside the metrics service:
it may block, raise, print, leak or exit, and nothing else notices. See docs/your-own-sink.md.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol  # Any: what JSON holds

from furlong.config.errors import Problem

CALLED_WITH: Mapping[str, tuple[str, ...]] = {"init": ("run", "config"), "write": ("rows",), "flush": (), "close": ()}
"""What each method is given, by position; only `write` must be there."""
_EXAMPLE = "See furlong.sinks.UserSink for the four methods."


class UserSink(Protocol):
    """Made with no arguments, used by one thread."""

    def init(self, run: str, config: Mapping[str, Any]) -> int | None:
        """Get ready; called once, before any row.

        run: the run's name; empty when the service keeps many. config: the resolved run without secrets, of URLs only
        scheme, host and port; or empty. Returns the `row` number of the last row that is safely there, if the other
        side can tell: what follows it is sent, and nothing twice. None: the service's own memory counts, which may send
        the newest rows again after a crash.
        """

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows, in order. Each has the keys of a line of metrics.jsonl and `row`, an ascending number.

        An exception has the same rows sent again later; `Refused` leaves one of them out for good.
        """

    def flush(self) -> None:
        """Make what was written safe; called after every write. That is not sent again, unless this process is killed
        before the service knows that it returned."""

    def close(self) -> None:
        """No more rows will come. Called once, unless the process is killed."""


class Refused(Exception):
    """One row that the other side will never take: it is left out and counted, and the rows after it go on.

    All rows before it in the same call are taken, none after it.
    """

    def __init__(self, row_id: int, reason: str) -> None:
        super().__init__(f"row {row_id}: {reason}")
        self.row_id, self.reason = row_id, reason


def wrong_class(given: object, path: str, *, key: str) -> Problem | None:
    """What is wrong with a class as a sink, told before a run starts; None: nothing that can be seen."""
    if not inspect.isclass(given):
        return Problem(key, path, f"must be a class, got {type(given).__name__}", _EXAMPLE)
    if inspect.isabstract(given):
        missing = ", ".join(sorted(getattr(given, "__abstractmethods__", ())))
        return Problem(key, path, f"is abstract: {missing} must be defined", _EXAMPLE)
    if problem := _cannot_call(given, (), f"{given.__name__}()"):
        return Problem(key, path, problem, "Give its parameters defaults; settings come from the environment.")
    for name, arguments in CALLED_WITH.items():
        method = getattr(given, name, None)
        if method is None and name != "write":
            continue
        if not callable(method):
            return Problem(key, path, f"must have a method {name}({', '.join(arguments)})", _EXAMPLE)
        own = () if isinstance(inspect.getattr_static(given, name), staticmethod | classmethod) else ("self",)
        if problem := _cannot_call(method, (*own, *arguments), f"{name}({', '.join(arguments)})"):
            return Problem(key, path, problem, "Change its parameters.")
        if inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method):
            return Problem(key, path, f"{name} must be a function or a coroutine, not a generator", "Use no yield.")
    return None


def _cannot_call(function: Any, arguments: Sequence[str], shown: str) -> str:
    """Why it cannot be called so; empty: it can, or it does not say."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # builtins may have none
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"is called as {shown}, but takes {signature}: {error}"
    return ""
