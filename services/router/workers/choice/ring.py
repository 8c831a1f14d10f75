"""A ring for consistent hashing: a key stays with its member while that one is there, and moves alone when it goes.

Many points a member, so that shares are even: with 128 the largest of 64 shares is about a quarter over the mean.
"""

import functools
import hashlib
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

POINTS = 128
_PER_DIGEST = 8
_INDEX_BITS = 32
_KEY_SALT = b"furlong key"
_NAME_SALT = b"furlong member"


class Ring(Generic[T]):
    """Members by name, on a ring of 64-bit points."""

    __slots__ = ("_num_members", "_owners", "_points")

    def __init__(self, members: Sequence[tuple[str, T]]) -> None:
        packed = sorted(
            [(point << _INDEX_BITS) | index for index, (name, _) in enumerate(members) for point in _points_of(name)]
        )
        mask = (1 << _INDEX_BITS) - 1
        self._points = [entry >> _INDEX_BITS for entry in packed]
        self._owners = [members[entry & mask][1] for entry in packed]
        self._num_members = len(members)

    def walk(self, key: bytes) -> Iterator[T]:
        """Every member once: the key's own, then in the order in which they would take over."""
        owners, size = self._owners, len(self._owners)
        if not size:
            return
        at = bisect_left(self._points, hash_of(key)) % size
        yield owners[at]
        seen = {id(owners[at])}
        for step in range(1, size):
            owner = owners[(at + step) % size]
            if id(owner) not in seen:
                yield owner
                seen.add(id(owner))
                if len(seen) == self._num_members:
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
