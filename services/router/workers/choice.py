"""Which worker takes the next request. Pure: sees numbers, knows no worker."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What the choice needs to know of a worker that may take requests."""

    in_flight: int
    """Requests it is answering now."""
    last_turn: int
    """Number of the choice that it was last picked in; 0: never."""
    failing: bool
    """It failed its last requests. An engine that fails at once is always idle and would draw all of the load."""


def choose(loads: Sequence[Load]) -> int | None:
    """Index of the worker with the fewest requests in flight; among equals the one whose last turn is longest ago.

    One that is failing is taken only if all are. None: there is no worker.
    """
    if not loads:
        return None
    return min(range(len(loads)), key=lambda i: (loads[i].failing, loads[i].in_flight, loads[i].last_turn))
