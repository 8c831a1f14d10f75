"""A ring for consistent hashing: a key stays with its member while that one is there, and moves alone when it goes.

Many points a member, so that shares are even: with 128 the largest of 64 shares is about a quarter over the mean.
"""

import functools
import hashlib
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

POINTS = 128
FEW = 16 * POINTS
"""Points that are quicker taken out one by one."""
_PER_DIGEST = 8
_KEY_SALT = b"furlong key"
_NAME_SALT = b"furlong member"


class Ring(Generic[T]):
    """Members by name, on a ring of 64-bit points."""

    __slots__ = ("_members", "_name_at", "_points")

    def __init__(self, members: Mapping[str, T]) -> None:
        self._members: Mapping[str, T] = {}
        self._points: list[int] = []
        self._name_at: dict[int, str] = {}
        self.set_members(members)

    def set_members(self, members: Mapping[str, T]) -> None:
        """Who is there from now on. Cheap for few that come and go: a thousand members have 128,000 points."""
        gone = self._members.keys() - members.keys()
        new = members.keys() - self._members.keys()
        if gone:
            self._remove({point for name in gone for point in _points_of(name)})
        if new:
            added = {point: name for name in sorted(new) for point in _points_of(name)}
            self._name_at.update(added)
            self._points = sorted(self._points + sorted(added))  # two sorted runs, which sorting merges
        self._members = members

    def _remove(self, points: set[int]) -> None:
        if len(points) > FEW:
            self._points = [point for point in self._points if point not in points]
        else:
            for point in points:
                del self._points[bisect_left(self._points, point)]
        for point in points:
            del self._name_at[point]

    def walk(self, key: bytes) -> Iterator[T]:
        """Every member once: the key's own, then in the order in which they would take over."""
        points, name_at, members = self._points, self._name_at, self._members
        size = len(points)
        if not size:
            return
        at = bisect_left(points, hash_of(key)) % size
        name = name_at[points[at]]
        yield members[name]
        seen = {name}
        for step in range(1, size):
            name = name_at[points[(at + step) % size]]
            if name not in seen:
                yield members[name]
                seen.add(name)
                if len(seen) == len(members):
                    return


def hash_of(key: bytes) -> int:
    """A key's place on the ring: the same in every process, and after a restart."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=_KEY_SALT).digest(), "little")


@functools.lru_cache(maxsize=4096)
def _points_of(name: str) -> tuple[int, ...]:
    points: list[int] = []
    for part in range(POINTS // _PER_DIGEST):
        digest = hashlib.blake2b(f"{part} {name}".encode(), digest_size=64, person=_NAME_SALT).digest()
        points.extend(struct.unpack(f"<{_PER_DIGEST}Q", digest))
    return tuple(points)
