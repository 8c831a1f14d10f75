"""A clock that stands still until it is told to go on, and workers without sockets that live by it."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from furlong.config import RunConfig
from services.router.settings import RouterSettings
from services.router.workers.registration import Registration
from services.router.workers.want import ANY, Want
from services.router.workers.workers import Refused, Ticket, Worker, Workers

SETTINGS = replace(
    RouterSettings.of(RunConfig()),
    queue_timeout_s=5.0,
    health_fail_threshold=3,
    health_success_threshold=1,
    breaker_failures=3,
    breaker_pause_s=2.0,
    max_queued=100,
)


@dataclass(eq=False)
class Timer:
    """A call that is to come."""

    at: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Monotonic seconds and the timers of a loop."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []

    def __call__(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.timers.append(timer := Timer(self.now + delay_s, callback))
        return cast("asyncio.TimerHandle", timer)

    @property
    def num_timers(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)

    def go_on(self, seconds: float) -> None:
        """Let time pass, with every timer in its moment."""
        end = self.now + seconds
        while True:
            self.timers = [timer for timer in self.timers if not timer.cancelled]
            due = [timer for timer in self.timers if timer.at <= end]
            if not due:
                break
            timer = min(due, key=lambda each: each.at)
            self.timers.remove(timer)
            self.now = max(self.now, timer.at)
            timer.callback()
        self.now = end


def workers_at(clock: Clock, **changes: object) -> Workers:
    settings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
    return Workers(settings, clock=clock, call_later=clock.call_later, random_source=random.Random(1))


def ready(
    workers: Workers, port: int = 1, *, admit: bool = True, priority: int = 0, labels: dict[str, str] | None = None
) -> Worker:
    """A worker that takes requests."""
    said = Registration(priority=priority, labels=labels or {})
    worker = workers.add(f"http://127.0.0.1:{port}", admit=admit, registration=said)
    workers.probe_answered(worker)
    return worker


@dataclass
class Waiting:
    """A request in line, and what came of it."""

    got: list[Worker] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    ticket: Ticket | None = None

    @property
    def num_callbacks(self) -> int:
        return len(self.got) + len(self.refused)


def wait(
    workers: Workers, want: Want = ANY, *, but_not: tuple[Worker, ...] = (), deadline: float | None = None
) -> Waiting:
    waiting = Waiting()
    waiting.ticket = workers.queue(want, waiting.got.append, waiting.refused.append, but_not=but_not, deadline=deadline)
    return waiting


def labelled(**labels: str) -> Want:
    return Want(labels=frozenset(labels.items()))
