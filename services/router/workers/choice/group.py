"""Workers among which one request may choose, and the ring of their names for those that choose by name."""

from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from services.router.workers.choice.ring import Ring


class Candidate(Protocol):
    """What a choice sees of a worker."""

    in_flight: int
    last_turn: int
    """Number of the choice that it was last picked in; 0: never."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Candidate)


class Group(Generic[T]):
    """Workers of one priority. The ring is brought up to date when it is first asked for."""

    __slots__ = ("_full", "_old_ring", "_ring", "workers")

    def __init__(self, workers: Sequence[T], *, full: "Group[T] | None" = None, ring: Ring[T] | None = None) -> None:
        """ring: that of the workers before, which few have left or joined since; it is this group's from now on."""
        self.workers = workers
        self._full = full
        self._old_ring = ring
        self._ring: Ring[T] | None = None

    @property
    def ring(self) -> Ring[T]:
        """The ring of this group, or of the one that it is a part of."""
        if self._full is not None:
            return self._full.ring
        if self._ring is None:
            self._ring = self._old_ring or Ring({})
            self._ring.set_members({worker.name: worker for worker in self.workers})
        return self._ring

    @property
    def last_ring(self) -> Ring[T] | None:
        """The ring for whoever comes after; None: none was needed yet."""
        return self._ring or self._old_ring

    @property
    def members(self) -> Collection[T] | None:
        """Whom on the ring the request may go to; None: all."""
        return None if self._full is None else set(self.workers)

    def part(self, workers: Sequence[T]) -> "Group[T]":
        """Some of its workers, in whose ring nobody moves who need not."""
        return Group(workers, full=self._full or self)


Choose = Callable[[Group[T], bytes, int], T | None]
