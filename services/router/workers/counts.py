"""Where the number of requests in flight at each worker is kept.

The one place that changes `Worker.in_flight`. Here it is a plain number of this process; a router of several processes
puts numbers that all of them share behind the same four calls.
"""

from collections.abc import Iterable

from services.router.workers.worker import Worker


class Counts:
    """Counts of one process."""

    def joined(self, worker: Worker) -> bool:
        """A registration begins, with nothing in flight. False: there is no place for one more."""
        return True

    def is_over(self, worker: Worker) -> bool:
        """Whether a registration that is leaving has left: nothing is in flight there, as last read."""
        return not worker.in_flight

    def forgotten(self, worker: Worker) -> None:
        """A registration that has left has nothing in flight any more; nobody will ask for it again."""

    def refresh(self, workers: Iterable[Worker]) -> None:
        """Bring `in_flight` of these up to date, before a choice or a look."""

    def take(self, worker: Worker, limit: int) -> bool:
        """One more, unless that would be more than limit. False: another process took the last place just now."""
        worker.in_flight += 1  # the choice has just seen that there is room, and nothing came between
        return True

    def give_back(self, worker: Worker) -> None:
        """One less."""
        worker.in_flight -= 1
