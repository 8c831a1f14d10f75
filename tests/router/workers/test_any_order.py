"""Whatever order things happen in: a model of the workers, asked after every step.

Random workers come, go, come back, are set, probed, broken; random requests take, wait, cancel, fail at once and give
back; time passes. After each step the counters must be those of the model, nobody may wait while a worker is free for
him, and nothing may ever have gone to a worker that is not the model's idea of ready.
"""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.router.workers.registration import Registration
from services.router.workers.want import ANY, Want
from services.router.workers.workers import Refused, State, Ticket, Worker
from tests.router.workers.clock import Clock, workers_at

LIMIT = 2
FAILS = 2
PORTS = st.integers(1, 3)
LABELS = st.sampled_from([{}, {"pool": "eval"}, {"pool": "eval", "zone": "a"}])
WANTS = st.sampled_from(
    [
        ANY,
        Want(session=b"one"),
        Want(session=b"two"),
        Want(prefix=b"three"),
        Want(labels=frozenset({("pool", "eval")})),
        Want(labels=frozenset({("pool", "eval"), ("zone", "a")}), session=b"one"),
    ]
)
ANSWERS = st.sampled_from([200, 404, 500, 503])
POLICIES = st.sampled_from(["least-in-flight", "round-robin", "power-of-two", "session", "prefix"])


@dataclass
class Known:
    """What the model knows of one registration."""

    needs_version: bool
    admitted: bool
    labels: frozenset[tuple[str, str]]
    up: bool = False
    bad_probes: int = 0
    version: int | None = None
    here: bool = True

    @property
    def ready(self) -> bool:
        return self.here and self.up and self.admitted and (not self.needs_version or self.version is not None)

    def go_down(self) -> None:
        self.up, self.version = False, None
        self.admitted = self.admitted and not self.needs_version


@dataclass(eq=False)
class Request:
    """One request in line."""

    want: Want
    but_not: tuple[Worker, ...]
    number: int
    deadline: float
    fails_at_once: bool
    num_callbacks: int = 0
    cancelled: bool = False
    ticket: Ticket | None = None

    @property
    def waiting(self) -> bool:
        return not self.cancelled and not self.num_callbacks


@dataclass
class Model:
    known: dict[Worker, Known] = field(default_factory=dict)
    current: dict[int, Worker] = field(default_factory=dict)
    taken: list[Worker] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


class AnyOrder(RuleBasedStateMachine):
    @initialize(policy=POLICIES)
    def begin(self, policy: str) -> None:
        self.clock = Clock()
        self.model = Model()
        self.workers = workers_at(
            self.clock,
            policy=policy,
            max_in_flight=LIMIT,
            max_queued=6,
            health_fail_threshold=FAILS,
            breaker_failures=2,
            breaker_pause_s=1.0,
        )

    # What happens to workers

    @rule(
        port=PORTS,
        admit=st.booleans(),
        labels=LABELS,
        priority=st.integers(0, 1),
        then=st.sampled_from(["", *["ready"] * 3]),
    )
    def add(self, port: int, admit: bool, labels: dict[str, str], priority: int, then: str) -> None:
        old = self.model.current.get(port)
        admits = admit and (old is None or not self.model.known[old].needs_version)
        if old is not None:
            self.model.known[old].here = False
        said = Registration(labels=labels, priority=priority)
        worker = self.workers.add(f"http://127.0.0.1:{port}", admit=admit, registration=said)
        assert worker is not old and worker.in_flight == 0
        self.model.current[port] = worker
        self.model.known[worker] = Known(not admits, admits, frozenset(labels.items()))
        if then == "ready":
            self.make_ready(port)

    @rule(port=PORTS)
    def make_ready(self, port: int) -> None:
        if (worker := self.model.current.get(port)) is not None:
            known = self.model.known[worker]
            if known.needs_version:
                known.admitted, known.version = True, 3
                self.workers.set_state(worker, admit=True, policy_version=3)
            known.up, known.bad_probes = True, 0
            self.workers.probe_answered(worker)

    @precondition(lambda self: len(self.model.current) == 3)
    @rule(port=PORTS)
    def remove(self, port: int) -> None:
        worker = self.model.current.pop(port, None)
        if worker is not None:
            self.model.known[worker].here = False
        assert self.workers.remove(f"http://127.0.0.1:{port}/") == (worker is not None)

    @rule(port=PORTS, admit=st.booleans(), version=st.sampled_from([None, 1, 2]))
    def set_state(self, port: int, admit: bool, version: int | None) -> None:
        if (worker := self.model.current.get(port)) is not None:
            known = self.model.known[worker]
            known.needs_version = known.needs_version or version is not None
            known.admitted, known.version = admit, version
            self.workers.set_state(worker, admit=admit, policy_version=version)

    @rule(port=PORTS, kind=st.sampled_from(["good", "good", "bad", "error", "gone"]))
    def probe(self, port: int, kind: str) -> None:
        if (worker := self.model.current.get(port)) is None:
            return
        known = self.model.known[worker]
        if kind == "good":
            known.up, known.bad_probes = True, 0
            self.workers.probe_answered(worker)
        elif kind == "gone":
            known.go_down()
            self.workers.gone(worker, "refused the connection")
        elif not (kind == "error" and known.up and not known.admitted):  # an engine that is paused may say so
            known.bad_probes += 1
            if known.up and known.bad_probes >= FAILS:
                known.go_down()
            self.workers.probe_failed(worker, "bad", refused=kind == "error")

    # What requests do

    @rule(want=WANTS, exclude=st.booleans(), number=st.integers(1, 4))
    def take(self, want: Want, exclude: bool, number: int) -> None:
        but_not = tuple(self.model.current.values())[:1] if exclude else ()
        for _ in range(number):
            worker = self.workers.take(want, but_not=but_not)
            if worker is not None:
                self.begun(worker, want, but_not)

    @rule(
        want=WANTS,
        exclude=st.booleans(),
        limit_s=st.sampled_from([0.2, 1.0, 5.0]),
        fails_at_once=st.lists(st.booleans(), min_size=1, max_size=3),
    )
    def queue(self, want: Want, exclude: bool, limit_s: float, fails_at_once: list[bool]) -> None:
        but_not = tuple(self.model.current.values())[:1] if exclude else ()
        for fails in fails_at_once:
            number = len(self.model.requests)
            self.join(Request(want, but_not, number, self.clock.now + limit_s, fails))

    def join(self, request: Request) -> None:
        self.model.requests.append(request)
        try:
            request.ticket = self.workers.queue(
                request.want,
                lambda worker: self.got(request, worker),
                lambda reason: self.refused(request, reason),
                but_not=request.but_not,
                deadline=request.deadline,
            )
        except Refused:
            assert not request.num_callbacks
            self.model.requests.remove(request)

    @precondition(lambda self: self.model.requests)
    @rule(index=st.integers(0, 20))
    def cancel(self, index: int) -> None:
        request = self.model.requests[-1 - index % len(self.model.requests)]
        request.cancelled = request.cancelled or not request.num_callbacks
        assert request.ticket is not None
        request.ticket.cancel()

    @precondition(lambda self: self.model.taken)
    @rule(index=st.integers(0, 20), answer=st.one_of(st.none(), ANSWERS))
    def give_back(self, index: int, answer: int | None) -> None:
        worker = self.model.taken.pop(index % len(self.model.taken))
        if answer is not None:
            self.workers.answered(worker, answer)
        self.workers.give_back(worker)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.go_on(seconds)
        late = [r for r in self.model.requests if r.waiting and r.deadline < self.clock.now - 0.01]
        assert not late, "each is told when its time is over"

    # What must hold

    def begun(self, worker: Worker, want: Want, but_not: tuple[Worker, ...]) -> None:
        known = self.model.known[worker]
        assert known.ready and worker.state is State.READY, "only a ready worker with confirmed weights"
        assert want.labels <= known.labels and worker not in but_not
        self.model.taken.append(worker)
        assert worker.in_flight == self.model.taken.count(worker) <= LIMIT

    def got(self, request: Request, worker: Worker) -> None:
        assert request.waiting, "exactly one callback, and none after a cancellation"
        request.num_callbacks += 1
        same = [r for r in self.model.requests if (r.want.labels, r.but_not) == (request.want.labels, request.but_not)]
        assert not [r for r in same if r.waiting and r.number < request.number], "first come, first served"
        self.begun(worker, request.want, request.but_not)
        if request.fails_at_once:
            self.workers.failed(worker, "broke off")
            self.model.taken.remove(worker)
            self.workers.give_back(worker)

    def refused(self, request: Request, reason: Refused) -> None:
        assert request.waiting and str(reason)
        request.num_callbacks += 1

    @invariant()
    def counters_are_what_is_taken(self) -> None:
        for worker in self.model.known:
            assert worker.in_flight == self.model.taken.count(worker)
        assert self.workers.num_waiting() == sum(r.waiting for r in self.model.requests)
        assert self.workers.num_ready() == sum(known.ready for known in self.model.known.values())

    @invariant()
    def each_is_as_the_model_has_it(self) -> None:
        for worker in self.model.current.values():
            known = self.model.known[worker]
            assert (worker.state is State.READY) == known.ready
            assert (worker.policy_version, worker.admitted) == (known.version, known.admitted)

    @invariant()
    def the_list_is_who_is_here_or_not_done(self) -> None:
        shown = set(self.workers.all())
        current = set(self.model.current.values())
        ports = {worker.url.port for worker in current}
        assert shown == current | {w for w in self.model.taken if w.url.port not in ports}

    @invariant()
    def nobody_waits_while_a_worker_is_free_for_him(self) -> None:
        for request in (r for r in self.model.requests if r.waiting):
            fitting = [
                w
                for w, known in self.model.known.items()
                if known.ready and request.want.labels <= known.labels and w not in request.but_not
            ]
            well = [w for w in fitting if not w.breaker.is_open]
            assert all(w.in_flight >= LIMIT for w in well or fitting)

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
        for worker in list(self.model.taken):
            self.model.taken.remove(worker)
            self.workers.give_back(worker)
        self.workers.close()
        while self.model.taken:
            self.workers.give_back(self.model.taken.pop())
        assert all(r.num_callbacks + r.cancelled == 1 for r in self.model.requests)
        assert self.workers.num_waiting() == 0 and not any(w.in_flight for w in self.model.known)
        assert self.clock.num_timers == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
