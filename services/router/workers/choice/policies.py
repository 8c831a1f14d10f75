"""The policies. Each is a function of what the workers are doing now; see the package for what they are given."""

import functools
import math
import random
from collections.abc import Sequence
from typing import TypeVar

from services.router.workers.choice.group import Candidate, Choose, Group

T = TypeVar("T", bound=Candidate)


def chooser(policy: str, *, bounded_load: float, random_source: random.Random) -> Choose[T]:
    """The function of a policy, by its name in the settings."""
    if policy == "least-in-flight":
        return by_least
    if policy == "round-robin":
        return by_turn
    if policy == "power-of-two":
        return functools.partial(by_two_choices, random_source=random_source)
    if policy in ("session", "prefix"):
        return functools.partial(by_affinity, bounded_load=bounded_load)
    raise ValueError(f"no policy is called {policy!r}. See --router-policy.")


def by_least(group: Group[T], key: bytes, limit: int) -> T | None:
    """The worker with the fewest requests in flight; among equals the one whose last turn is longest ago."""
    return least_in_flight(group.workers, limit)


def least_in_flight(workers: Sequence[T], limit: int) -> T | None:
    """`by_least` of a plain sequence."""
    best: T | None = None
    fewest, oldest = limit, -1
    for worker in workers:
        in_flight = worker.in_flight
        if in_flight < fewest:
            best, fewest, oldest = worker, in_flight, worker.last_turn
        elif in_flight == fewest and worker.last_turn < oldest:
            best, oldest = worker, worker.last_turn
    return best


def by_turn(group: Group[T], key: bytes, limit: int) -> T | None:
    """One after the other: the worker with room whose last turn is longest ago."""
    best: T | None = None
    oldest = math.inf
    for worker in group.workers:
        if worker.last_turn < oldest and worker.in_flight < limit:
            best, oldest = worker, worker.last_turn
    return best


def by_two_choices(group: Group[T], key: bytes, limit: int, *, random_source: random.Random) -> T | None:
    """Of two drawn at random the one with fewer requests in flight: nearly as even as looking at all of them, and
    several routers that choose at the same moment do not all pick the same worker."""
    workers = group.workers
    size = len(workers)
    if size < 2:
        return least_in_flight(workers, limit)
    first = int(random_source.random() * size)
    second = int(random_source.random() * (size - 1))
    one, other = workers[first], workers[second + (second >= first)]
    best = one if one.in_flight <= other.in_flight else other
    return best if best.in_flight < limit else least_in_flight(workers, limit)


def by_affinity(group: Group[T], key: bytes, limit: int, *, bounded_load: float) -> T | None:
    """The key's worker on the ring, or the next one there that is not overloaded.

    Overloaded: with this request it would have more than bounded_load times the mean in flight, rounded up
    (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, 2016). Without a key: the least in flight.
    """
    workers = group.workers
    if not key or not workers:
        return least_in_flight(workers, limit)
    members = group.members
    fallback: T | None = None
    most = 0
    for worker in group.ring.walk(key):
        if members is not None and worker not in members:
            continue
        in_flight = worker.in_flight
        if in_flight == 0:
            return worker
        if not most:
            most = min(limit, math.ceil(bounded_load * (sum([w.in_flight for w in workers]) + 1) / len(workers)))
        if in_flight < most:
            return worker
        if fallback is None and (fallback := least_in_flight(workers, limit)) is None:
            return None  # all are at the limit: not worth walking the whole ring for
    return fallback
