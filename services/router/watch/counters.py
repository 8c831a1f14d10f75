"""The numbers that requests leave behind: plain ints in lists and dicts, as cheap to count as Python allows.

Owns what is bounded: a worker, a path class and a status have a counter; clients and workers cannot make more of them.
Never renders anything.
"""

from http import HTTPStatus

from services.router.watch.buckets import NUM_BUCKETS

NO_ANSWER = 0
"""The status of a request that no head of an answer was sent for."""
ODD_STATUS = -1
"""Stands for all statuses that HTTP has no name for."""
KNOWN_STATUSES = frozenset((NO_ANSWER, 499, 529, *map(int, HTTPStatus)))
MAX_KINDS = 64
OTHER_KIND = "other"


class Cell:
    """The requests of one path class that one worker had last, or that no worker got."""

    __slots__ = ("bytes_in", "bytes_out", "first", "first_s", "queue", "queue_s", "statuses", "total", "total_s")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.total = [0] * NUM_BUCKETS
        """From a request's head to its end."""
        self.total_s = 0.0
        self.first = [0] * NUM_BUCKETS
        """From its sending to the first byte of the answer."""
        self.first_s = 0.0
        self.queue = [0] * NUM_BUCKETS
        """Its wait for a worker; those that did not wait are not in it."""
        self.queue_s = 0.0

    def first_of(self, status: int) -> None:
        """Count a status that has no counter yet."""
        if status not in KNOWN_STATUSES:
            status = ODD_STATUS
        self.statuses[status] = self.statuses.get(status, 0) + 1


class OfWorker:
    """What is counted of one worker apart from its path classes."""

    __slots__ = ("errors", "probe_s", "probes_bad", "probes_good", "unseen_since")

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.probes_good = 0
        self.probes_bad = 0
        self.probe_s = 0.0
        self.unseen_since = 0.0
        """Monotonic time since which it is not registered. 0: it is."""


def count(kinds: dict[str, int], kind: str) -> None:
    """Count one more of a kind; past MAX_KINDS of them, all others are one."""
    if kind not in kinds and len(kinds) >= MAX_KINDS:
        kind = OTHER_KIND
    kinds[kind] = kinds.get(kind, 0) + 1
