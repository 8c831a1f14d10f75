"""Starts the processes of a run, watches them, and ends them together: the state machine behind `furlong up`.

The death of any ends the run, but for the metrics service's and the router's: those are started again (keeper.py).

Its main thread starts every child (the kernel ties a child's leash to the thread that started it), takes the signals
and decides; it never makes a call that can hang. Whatever happens, `run` returns with no child left.
"""

import contextlib
import functools
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType

from furlong.launch.child import Child
from furlong.launch.console import Console
from furlong.launch.descendants import kill_descendants, running_descendants
from furlong.launch.keeper import Keeper
from furlong.launch.plan import ChildPlan
from furlong.launch.readiness import Progress, ReadinessWatch, Ready
from furlong.process import STARTED_AGAIN, ExitCode
from furlong.rundir import RunDir

ECHO_S = 0.2
"""A signal so soon after one is the same: a wrapper (`timeout`, a job runner) passes on what the terminal sent too."""
METRICS, ROUTER = "metrics", "router"
POLL_S = 0.05
SETTLE_S = 0.6
"""When one process ended, how long others may take to show that they are the cause."""
STARTING_GRACE_S = 2.0
"""How long trainers that have not begun may take to stop."""
CRASH_GRACE_S = 5.0
"""How long the rest may take to stop after a crash."""
SERVICE_GRACE_S = 15.0
"""How long one service may take to drain once the trainers are gone."""
KILL_S = 2.0
"""How long a killed process may take to vanish."""
LAST_LINES = 20
PEACEFUL = (ExitCode.DONE, ExitCode.DRAINED, ExitCode.DIVERGED, ExitCode.HALTED)
"""Endings that the trainer chose: the rest may take its time to drain."""
STOP_ORDER = ("rollout", ROUTER, METRICS)
"""After the trainers. Metrics last, so that what the others say at their end is kept."""
CLOSING_STARTS = 3
"""How often metrics is started again to take in and hand on what is left, when the run is closed."""
CLOSING_START_S = 60.0
"""How long it may take to start then."""
PATIENCE_S = 5.0
"""After so long it is said that it is waited for."""


@dataclass(frozen=True)
class Limits:
    """How long things may take."""

    start_timeout_s: float
    drain_budget_s: float


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    code: int
    reason: str
    """A sentence for people; empty when all went well."""
    metrics: str = ""
    """Why the metrics service may not have taken in and handed on everything; empty when it has."""


class _StopRequested(Exception):
    """The first signal."""


class _StopAtOnce(Exception):
    """A second signal."""


class Supervisor:
    """Runs one set of processes, once."""

    def __init__(
        self,
        plans: Sequence[ChildPlan],
        *,
        run_dir: RunDir,
        limits: Limits,
        output: Console,
        on_started: Callable[[Mapping[str, int]], None] = lambda pids: None,
        on_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        """on_started: told the pids, by instance, once all are started. on_stopping: told once, before they end."""
        self._plans = plans
        self._run_dir = run_dir
        self._limits = limits
        self._output = output
        self._on_started = on_started
        self._on_stopping = on_stopping
        self._children: dict[str, Child] = {}
        self._events: queue.SimpleQueue[Ready | Progress | signal.Signals] = queue.SimpleQueue()
        self._readiness: ReadinessWatch | None = None
        self._waiting_for: set[str] = set()
        self._num_signals = 0
        self._signalled_at = 0.0
        self._stopping = False
        self._keepers = self._make_keepers(run_dir)
        self._kept = set(self._keepers)
        self._told_late = False
        self._ended_late: set[int] = set()
        self._not_ours = {process.pid for process in running_descendants()}

    def _make_keepers(self, run_dir: RunDir) -> dict[str, Keeper]:
        """By service."""
        spool = run_dir.spool
        keep = functools.partial(Keeper, start_again=self._start_again, say=self._say)
        limit = "up to --telemetry-spool-bytes a service"
        return {
            METRICS: keep(
                meanwhile=f"Training goes on; records wait in {spool}",
                without=f"Training goes on without it; records wait in {spool}, {limit}.",
            ),
            ROUTER: keep(meanwhile="Rollout waits for it, and asks again for what was under way"),
        }

    def run(self) -> Ending:
        """Until the trainers are done, something fails, or a signal says stop. Main thread only."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        for number in previous:
            signal.signal(number, self._take_signal)
        try:
            return self._run()
        finally:
            self._end_everything()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self) -> Ending:
        try:
            try:
                self._start_all()
                ending = self._watch()
            except _StopRequested:
                ending = self._drain_trainers()
            except OSError as error:
                ending = Ending(ExitCode.CRASHED, f"a process could not be started: {error}")
            self._stop_rest(ending)
            ending = replace(ending, metrics=self._metrics_shortfall())
        except _StopAtOnce:
            return Ending(ExitCode.KILLED, "stopped at once by a second signal; what was not saved is lost")
        return ending

    # -- starting ------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        for plan in self._plans:
            path = self._run_dir.log(plan.instance).with_suffix(".out")
            self._children[plan.instance] = Child(plan, output_path=path, show_line=self._output.line)
        pids = {instance: child.pid for instance, child in self._children.items()}
        self._on_started(pids)
        awaited = {plan.instance: pids[plan.instance] for plan in self._plans if plan.awaited}
        self._waiting_for = set(awaited)
        self._readiness = ReadinessWatch(self._run_dir, awaited, self._events.put)
        self._say(f"started {', '.join(pids)}; logs in {self._run_dir.log('x').parent}")

    def _start_again(self, dead: Child, why: str) -> None:
        """The same process anew. Raises OSError."""
        plan = replace(dead.plan, environment={**dead.plan.environment, STARTED_AGAIN: why})
        child = Child(plan, output_path=dead.output_path, show_line=self._output.line)
        self._children[plan.instance] = child
        self._waiting_for.add(plan.instance)
        if self._readiness:
            self._readiness.add(plan.instance, child.pid)
        with contextlib.suppress(OSError):  # a full disk: `furlong status` knows it by its address
            self._on_started({instance: known.pid for instance, known in self._children.items()})

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(signal.Signals(number))

    # -- watching ------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One turn of the loop: take what was reported, or wait a moment. Raises on signals."""
        for service in self._kept:
            self._look_after(service)
        try:
            event = self._events.get(timeout=POLL_S)
        except queue.Empty:
            return
        if isinstance(event, signal.Signals):
            self._on_signal(event)
        elif isinstance(event, Ready):
            self._take_ready(event)
        else:
            self._say(event.text)

    def _take_ready(self, event: Ready) -> None:
        child = self._children[event.instance]
        if child.pid != event.pid:  # it has died since, and was started again
            return
        self._waiting_for.discard(event.instance)
        if keeper := self._keepers.get(child.plan.service):
            keeper.serves()
        self._say(f"{event.instance} ready at {event.address} ({time.monotonic() - child.started:.1f} s)")

    def _look_after(self, service: str, *, at_once: bool = False) -> None:
        for child in self._of(service):
            others_start = self._is_starting() and not self._stopping
            self._keepers[service].look(child, others_start=others_start, at_once=at_once)

    def _is_starting(self) -> bool:
        """Whether training has not begun."""
        return any(child.plan.instance in self._waiting_for for child in self._of("trainer"))

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._num_signals and now - self._signalled_at < ECHO_S:
            return
        self._num_signals, self._signalled_at = self._num_signals + 1, now
        if self._num_signals > 1 and number != signal.SIGHUP:
            self._say(f"{number.name} again: ending everything at once")
            raise _StopAtOnce
        if self._stopping:
            self._say("already stopping; once more ends everything at once")
            return
        what = f"finishing this iteration and saving, at most {self._limits.drain_budget_s:g} s"
        if self._is_starting():
            what = "stopping; nothing was begun that must be saved"
        self._say(f"{number.name}: {what}. Once more (Ctrl-C) ends everything at once.")
        raise _StopRequested

    def _watch(self) -> Ending:
        """Until all trainers are done, or something ended that should not have."""
        while True:
            self._turn()
            trainers = self._of("trainer")
            if any(self._failed(child) for child in self._children.values()):
                return self._judge_failure()
            done = [child.ended for child in trainers if child.exit_code() is not None and child.ended]
            if done and len(done) == len(trainers):
                return Ending(ExitCode.DONE, "")
            if done and time.monotonic() > min(done) + self._limits.drain_budget_s:
                return self._straggling(trainers)
            oldest = time.monotonic() - self._limits.start_timeout_s
            late = [child for name in self._waiting_for if (child := self._children[name]).started < oldest]
            if needed := [child for child in late if child.plan.service != METRICS]:
                return self._late(needed)
            if late:
                self._tell_late_metrics()

    def _failed(self, child: Child) -> bool:
        code = child.exit_code()
        keeper = self._keepers.get(child.plan.service)
        if keeper and not keeper.ends_run:
            return False
        return code is not None and not (child.plan.is_trainer and code == ExitCode.DONE)

    def _judge_failure(self) -> Ending:
        """Something ended: wait a moment for what may be the cause, then name it with its last words."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            self._turn()
        failed = [child for child in self._children.values() if self._failed(child)]
        cause = min(failed, key=lambda child: (child.exit_code() == ExitCode.PEER_LOST, child.ended))
        code = cause.exit_code()
        if cause.plan.is_trainer and code == ExitCode.DRAINED:
            return Ending(ExitCode.DRAINED, "the trainer was asked to stop; it saved a checkpoint")
        if cause.plan.is_trainer and code == ExitCode.HALTED:
            return Ending(ExitCode.HALTED, "an alert that --halt-on names fired; the trainer saved a checkpoint")
        for child in failed:
            if child is not cause:
                self._say(f"{child.plan.instance} {child.describe_end()} too; see {child.output_path}")
        return Ending(self._truthful_code(cause), self._last_words(cause))

    def _truthful_code(self, child: Child) -> int:
        """The child's own code where it tells of the run; a service that ends while it should serve crashed."""
        code = child.exit_code()
        telling: tuple[int, ...] = (ExitCode.BAD_CONFIG, ExitCode.DIVERGED, ExitCode.PEER_LOST, ExitCode.HALTED)
        if not child.plan.is_trainer:
            telling = (ExitCode.BAD_CONFIG, ExitCode.PEER_LOST) if child.plan.instance in self._waiting_for else ()
        return code if code is not None and code in telling else ExitCode.CRASHED

    def _last_words(self, child: Child) -> str:
        while_what = " while starting" if child.plan.instance in self._waiting_for else ""
        lines = child.last_lines(LAST_LINES)
        shown = "".join(f"\n    {line}" for line in lines) or " nothing"
        keeper = self._keepers.get(child.plan.service)
        ended = (keeper and keeper.given_up) or f"{child.plan.instance} {child.describe_end()}"
        head = f"{ended}{while_what}."
        log_path = self._run_dir.log(child.plan.instance)
        return f"{head} Its log: {log_path}. Its last output ({child.output_path}):{shown}"

    def _straggling(self, trainers: Sequence[Child]) -> Ending:
        names = ", ".join(child.plan.instance for child in trainers if child.exit_code() is None)
        limit = f"{self._limits.drain_budget_s:g} s (--drain-budget-s)"
        return Ending(ExitCode.CRASHED, f"{names} still ran {limit} after the other trainer ranks were done")

    def _late(self, late: Sequence[Child]) -> Ending:
        """The start took too long: name who is not ready and what it said last."""
        names = ", ".join(child.plan.instance for child in late)
        said = "\n".join(self._last_words(child) for child in late)
        limit = f"{self._limits.start_timeout_s:g} s (--start-timeout-s)"
        return Ending(ExitCode.CRASHED, f"not ready within {limit}: {names}.\n{said}")

    def _tell_late_metrics(self) -> None:
        """Nobody's training waits for metrics."""
        if not self._told_late:
            self._told_late = True
            limit = f"{self._limits.start_timeout_s:g} s (--start-timeout-s)"
            where = f"records wait in {self._run_dir.spool}; its log: {self._run_dir.log(METRICS)}"
            self._say(f"metrics is not ready within {limit}. Training goes on; {where}")

    # -- ending --------------------------------------------------------------------------------------------------

    def _drain_trainers(self) -> Ending:
        """After the first signal: the trainers finish their iteration and save; how that went."""
        self._begin_stopping()
        trainers = self._of("trainer")
        starting = self._is_starting()
        self._terminate(trainers)
        if starting:  # there is nothing to save yet
            if not self._ended_within(trainers, STARTING_GRACE_S):
                self._kill(trainers)
            return Ending(ExitCode.DRAINED, "stopped while starting; nothing was trained since the last checkpoint")
        if not self._ended_within(trainers, self._limits.drain_budget_s):
            names = ", ".join(child.plan.instance for child in trainers if child.exit_code() is None)
            reason = f"{names} did not stop within {self._limits.drain_budget_s:g} s (--drain-budget-s) and was ended"
            self._kill(trainers)
            return Ending(ExitCode.KILLED, f"{reason}; what was done since the last checkpoint is lost")
        bad = [child for child in trainers if child.exit_code() not in (ExitCode.DONE, ExitCode.DRAINED)]
        if bad:
            return Ending(self._truthful_code(bad[0]), self._last_words(bad[0]))
        if all(child.exit_code() == ExitCode.DONE for child in trainers):
            return Ending(ExitCode.DONE, "")
        return Ending(ExitCode.DRAINED, "the iteration was finished and saved")

    def _stop_rest(self, ending: Ending) -> None:
        """Stop what still runs, in order: trainers, then who feeds them, metrics last."""
        self._begin_stopping()
        well = ending.code in PEACEFUL
        if not well:
            self._kept.clear()
        unready = frozenset(self._waiting_for)
        for service in ("trainer", *STOP_ORDER):
            self._kept.discard(service)
            children = self._of(service)
            if service == METRICS and well:
                self._close_metrics()
                continue
            self._terminate(children)
            self._end_within(children, SERVICE_GRACE_S if well or service == METRICS else CRASH_GRACE_S)
            for child in children:
                clean = child.plan.instance in unready or child.exit_code() in PEACEFUL
                if well and not clean:
                    self._say(f"{child.plan.instance} {child.describe_end()}; see {child.output_path}")

    def _close_metrics(self) -> None:
        """Let it take in what the others have left, hand everything on, and end. One that dies meanwhile, or was
        suspended, is started again for it."""
        for _ in range(CLOSING_STARTS):
            self._await_metrics(min(self._limits.start_timeout_s, CLOSING_START_S))
            children = self._of(METRICS)
            suspended = any(child.is_suspended() for child in children)
            self._terminate(children)
            # its sinks may use all of the drain budget; the rest is for the frame around them
            grace_s = CRASH_GRACE_S if suspended else max(SERVICE_GRACE_S, self._limits.drain_budget_s + CRASH_GRACE_S)
            self._end_within(children, grace_s)
            done = all(child.exit_code() in PEACEFUL for child in children)
            if done or self._keepers[METRICS].given_up or not (suspended or self._died_by_itself(children)):
                return

    def _await_metrics(self, limit_s: float) -> None:
        """Start it if it is dead, and wait until it serves."""
        began, told = time.monotonic(), False
        while self._waits_for_metrics() and time.monotonic() < began + limit_s:
            self._look_after(METRICS, at_once=True)
            self._turn()
            if not told and time.monotonic() > began + PATIENCE_S:
                told = True
                self._say(f"waiting until metrics has taken in what is left, at most {limit_s:g} s")

    def _waits_for_metrics(self) -> bool:
        """Whether there is one that starts, or is still to be started again."""
        dead = any(child.exit_code() is not None for child in self._of(METRICS))
        return not self._keepers[METRICS].given_up and (dead or METRICS in self._waiting_for)

    def _end_within(self, children: Sequence[Child], grace_s: float) -> None:
        """Wait for their end, which they were asked for; end at once who is late."""
        if self._ended_within(children, grace_s):
            return
        late = [child for child in children if child.exit_code() is None]
        self._say(f"{', '.join(child.plan.instance for child in late)} did not stop within {grace_s:g} s and is ended")
        self._ended_late.update(child.pid for child in late)
        self._kill(children)
        self._ended_within(children, KILL_S)

    def _died_by_itself(self, children: Sequence[Child]) -> bool:
        return any(child.pid not in self._ended_late for child in children)

    def _metrics_shortfall(self) -> str:
        """Why metrics may not have everything: it was given up, or ended in another way than it should have."""
        if self._keepers[METRICS].given_up:
            return self._keepers[METRICS].given_up
        ended = [child for child in self._of(METRICS) if child.exit_code() not in PEACEFUL]
        return f"metrics {ended[0].describe_end()}" if ended else ""

    def _begin_stopping(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._on_stopping()

    def _ended_within(self, children: Sequence[Child], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while any(child.exit_code() is None for child in children):
            if time.monotonic() > deadline:
                return False
            self._turn()
        return True

    def _terminate(self, children: Sequence[Child]) -> None:
        for child in children:
            child.send(signal.SIGTERM)

    def _kill(self, children: Sequence[Child]) -> None:
        for child in children:
            child.send(signal.SIGKILL)

    def _end_everything(self) -> None:
        """Whatever is left, at once; then pass on the last lines that were written."""
        if self._readiness:
            self._readiness.close()
        left = {child.pid for child in self._children.values() if child.exit_code() is None}
        killed = kill_descendants(besides=self._not_ours)
        strays = [name for name in killed if not any(f"(pid {pid})" in name for pid in left)]
        if strays and not left:
            self._say(f"ended what a service had left behind: {', '.join(strays)}")
        for child in self._children.values():
            child.exit_code()
            child.finish_relay(timeout_s=2.0)

    # -- small words ---------------------------------------------------------------------------------------------

    def _of(self, service: str) -> list[Child]:
        return [child for child in self._children.values() if child.plan.service == service]

    def _say(self, text: str) -> None:
        self._output.line(f"[up] {text}")
