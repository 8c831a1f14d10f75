"""Who takes the next request, among those that may: priorities, labels, limits and breakers around the chosen policy.

Keeps ready workers sorted for the choice, so that a request builds no list unless it has labels, has been tried, or a
breaker is open. Owns the turns; changes counts through `Counts` alone.
"""

import random
import sys
from collections.abc import Callable, Collection, Iterable

from services.router.settings import RouterSettings
from services.router.workers.choice.group import Choose, Group
from services.router.workers.choice.policies import chooser, least_in_flight
from services.router.workers.counts import Counts
from services.router.workers.want import ANY, Want
from services.router.workers.worker import State, Worker

NO_LIMIT = sys.maxsize
MAX_KEPT_LABEL_SETS = 256

Groups = tuple[Group[Worker], ...]
Labels = frozenset[tuple[str, str]]


class Selection:
    """The ready workers by priority, highest first."""

    def __init__(
        self,
        registered: Callable[[], Iterable[Worker]],
        settings: RouterSettings,
        counts: Counts,
        random_source: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._registered = registered
        self._limit = settings.max_in_flight or NO_LIMIT
        self._counts = counts
        self._clock = clock
        self._choose: Choose[Worker] = chooser(
            settings.policy, bounded_load=settings.bounded_load, random_source=random_source
        )
        self._all: Groups | None = None
        """None: to be sorted anew."""
        self._by_priority: dict[int, Group[Worker]] = {}
        self._labelled: dict[Labels, Groups] = {}
        self._open: set[Worker] = set()
        self._turn = 0

    def changed(self) -> None:
        """Membership or a state changed: sort again when next asked."""
        self._all = None
        self._labelled.clear()

    def opened(self, worker: Worker) -> None:
        """A worker's breaker opened."""
        self._open.add(worker)

    def closed(self, worker: Worker) -> None:
        """A worker's breaker closed, or the worker left."""
        self._open.discard(worker)

    def num_ready(self) -> int:
        """Workers that take requests now."""
        return sum(len(group.workers) for group in self._groups(frozenset()))

    def take(self, want: Want, but_not: Collection[Worker]) -> Worker | None:
        """The worker for a request, counted as in flight there. None: nobody can take it now."""
        while True:
            groups = self._all if want is ANY and self._all is not None else self._groups(want.labels)
            worker = self._of_plain(groups, want) if not (self._open or but_not) else self._of(groups, want, but_not)
            if worker is None:
                return None
            before = worker.in_flight
            if self._counts.take(worker, self._limit):
                break
        now = 0.0
        if worker.breaker.is_open and worker.breaker.may_try(now := self._clock()):
            worker.breaker.begin_trial(before)
        self._turn += 1
        worker.last_turn = self._turn
        if before == 0:
            worker.last_heard = now or self._clock()
        return worker

    def _of_plain(self, groups: Groups, want: Want) -> Worker | None:
        for group in groups:
            self._counts.refresh(group.workers)
            worker = self._choose(group, want.session or want.prefix, self._limit)
            if worker is not None:
                return worker
        return None

    def _of(self, groups: Groups, want: Want, but_not: Collection[Worker]) -> Worker | None:
        """With breakers: whoever is well, and one try of who is not; if nobody is well, anybody."""
        key = want.session or want.prefix
        now = self._clock()
        somebody_is_well = False
        for group in groups:
            self._counts.refresh(group.workers)
            well = [w for w in group.workers if not w.breaker.is_open and w not in but_not]
            due = [w for w in group.workers if w.breaker.may_try(now) and w not in but_not]
            somebody_is_well = somebody_is_well or bool(well)
            worker = None if key else least_in_flight(due, self._limit)
            worker = worker or self._choose(group.part([*well, *due]), key, self._limit)
            if worker is not None:
                return worker
        if somebody_is_well:
            return None  # each of them is at its limit: wait for one of them
        for group in groups:
            rest = [w for w in group.workers if w not in but_not]
            worker = self._choose(group.part(rest), key, self._limit)
            if worker is not None:
                return worker
        return None

    def _groups(self, labels: Labels) -> Groups:
        everyone = self._all if self._all is not None else self._sort()
        if not labels:
            return everyone
        found = self._labelled.get(labels)
        if found is None:
            fitting = ((group, [w for w in group.workers if labels <= w.label_set]) for group in everyone)
            found = tuple(group.part(workers) for group, workers in fitting if workers)
            if not found:
                return found  # clients make labels up, thousands in one header: only what some worker has is kept
            if len(self._labelled) >= MAX_KEPT_LABEL_SETS:
                self._labelled.clear()
            self._labelled[labels] = found
        return found

    def _sort(self) -> Groups:
        by_priority: dict[int, list[Worker]] = {}
        for worker in self._registered():
            if worker.state is State.READY:
                by_priority.setdefault(worker.priority, []).append(worker)
        rings = {priority: group.last_ring for priority, group in self._by_priority.items()}
        self._by_priority = {
            priority: Group(by_priority[priority], ring=rings.get(priority))
            for priority in sorted(by_priority, reverse=True)
        }
        self._all = tuple(self._by_priority.values())
        return self._all
