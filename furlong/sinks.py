"""What a sink of your own is: a class named by `--metrics-sink pkg.mod.Class`. Owns the contract; runs nothing.

Only `write` is needed; each method may be `async`. The class runs in a process of its own beside the metrics service:
it may block, raise, print, leak or exit, and nothing else notices. See "A sink of your own" in docs/metrics.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol  # Any: what JSON holds


class UserSink(Protocol):
    """Made with no arguments, used by one thread."""

    def init(self, run: str, config: Mapping[str, Any]) -> int | None:
        """Get ready; called once, before any row.

        run: the run's name; empty when the service keeps many. config: the resolved run without secrets, or empty.
        Returns the `row` number of the last row that is safely there, if the other side can tell: what follows it is
        sent, and nothing twice. None: the service's own memory counts, which may send the newest rows again after a
        crash.
        """

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows, in order. Each has the keys of a line of metrics.jsonl and `row`, an ascending number.

        An exception has the same rows sent again later; `Refused` leaves one of them out for good.
        """

    def flush(self) -> None:
        """Make what was written safe; called after every write. What returned from here is never sent again."""

    def close(self) -> None:
        """No more rows will come. Called once, unless the process is killed."""


class Refused(Exception):
    """One row that the other side will never take: it is left out and counted, and the rows after it go on.

    All rows before it in the same call are taken, none after it.
    """

    def __init__(self, row_id: int, reason: str) -> None:
        super().__init__(f"row {row_id}: {reason}")
        self.row_id, self.reason = row_id, reason
