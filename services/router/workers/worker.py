"""One worker: one registration of one engine, what is known of it, and the state that follows from that."""

import asyncio
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.router.workers.breaker import Breaker, BreakerState
from services.router.workers.registration import DEFAULT_TYPE, NO_LABELS, Record, Registration
from services.router.workers.urls import WorkerUrl

__all__ = ["DEFAULT_TYPE", "NO_LABELS", "Life", "State", "Worker"]


class State(enum.Enum):
    """Whether a worker takes requests; the names of furlong.v1.WorkerState."""

    JOINING = 1
    READY = 2
    UNREADY = 3
    DRAINING = 4


class Life(enum.Enum):
    """What probes and connections say of a worker's process."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class Worker:
    """One registration of one engine. Only `Workers`, and `Counts` for it, change it."""

    worker_id: str
    url: WorkerUrl
    slot: int = -1
    """Its place among numbers that several processes share."""
    registration: Registration
    configured: bool = False
    """Named by the router's flags."""
    self_admitting: bool
    """It needs no confirmation of its weights: registered by HTTP or flags, or with admit_without_policy_version."""
    admitted: bool
    was_admitted: bool
    policy_version: int | None = None
    life: Life = Life.UNKNOWN
    removed: bool = False
    in_flight: int = 0
    """Requests that it is answering now, as last read or changed through `Counts`."""
    num_requests: int = 0
    num_failures: int = 0
    last_error: str = ""
    good_probes: int = 0
    """In a row."""
    bad_probes: int = 0
    """In a row."""
    last_heard: float = 0.0
    """Monotonic time of the last byte from it, or of the first request after it was idle."""
    last_turn: int = 0
    """Number of the choice that it was last picked in; 0: never."""
    breaker: Breaker
    probe_soon: asyncio.Event = field(default_factory=asyncio.Event)
    # Of the registration, for what is done for each request:
    worker_type: str = field(init=False)
    labels: Mapping[str, str] = field(init=False)
    label_set: frozenset[tuple[str, str]] = field(init=False)
    """The same, to be compared."""
    priority: int = field(init=False)
    """Higher first: one of a lower priority gets a request only if no higher one can take it."""
    api_key: str | None = field(init=False, repr=False)
    """Never shown, logged or given out."""

    def __post_init__(self) -> None:
        said = self.registration
        self.worker_type, self.labels = said.worker_type, said.labels
        self.label_set = frozenset(said.labels.items())
        self.priority, self.api_key = said.priority, said.api_key

    @property
    def name(self) -> str:
        """What stays the same when it is registered again: sessions find their worker by it."""
        return str(self.url)

    @property
    def failures_in_a_row(self) -> int:
        """Of its last requests."""
        return self.breaker.failures_in_a_row

    @property
    def breaker_state(self) -> BreakerState:
        """Whether its last requests failed."""
        return self.breaker.state

    @property
    def state(self) -> State:
        """What follows from the rest."""
        if self.removed:
            return State.DRAINING
        if self.life is Life.DOWN:
            return State.UNREADY
        proven = self.self_admitting or self.policy_version is not None
        if self.admitted and self.life is Life.UP and proven:
            return State.READY
        return State.JOINING if self.admitted or not self.was_admitted else State.UNREADY

    def record(self) -> Record:
        """What is kept of it over a restart of the router."""
        return Record(
            worker_id=self.worker_id,
            url=self.name,
            registration=self.registration,
            self_admitting=self.self_admitting,
            paused=self.self_admitting and not self.admitted,
            configured=self.configured,
        )
