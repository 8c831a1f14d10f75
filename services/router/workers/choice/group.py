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
    """Workers of one priority. The ring is made when it is first asked for, and kept."""

    __slots__ = ("_full", "_ring", "workers")

    def __init__(self, workers: Sequence[T], *, full: "Group[T] | None" = None) -> None:
        self.workers = workers
        self._full = full
        self._ring: Ring[T] | None = None

    @property
    def ring(self) -> Ring[T]:
        """The ring of this group, or of the one that it is a part of."""
        if self._full is not None:
            return self._full.ring
        if self._ring is None:
            self._ring = Ring([(worker.name, worker) for worker in self.workers])
        return self._ring

    @property
    def members(self) -> Collection[T] | None:
        """Whom on the ring the request may go to; None: all."""
        return None if self._full is None else set(self.workers)

    def part(self, workers: Sequence[T]) -> "Group[T]":
        """Some of its workers, in whose ring nobody moves who need not."""
        return Group(workers, full=self)


Choose = Callable[[Group[T], bytes, int], T | None]
