"""The training loop: take a rollout, train it, publish the weights, tell, save and evaluate when due.

Sees a Backend and a Session, never a process group or a sharded tensor. A stop ends it after the iteration under way,
with a checkpoint.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import structlog

from furlong.config import RunConfig
from furlong.process import ExitCode, StopSignal
from furlong.telemetry import Telemetry
from services.trainer.backend import Backend, TrainResult
from services.trainer.batch import BatchRules, make_batch
from services.trainer.checkpoint import Checkpoints, Meta
from services.trainer.checkpoint_writer import checkpoint_writer
from services.trainer.publisher import Published
from services.trainer.ranks import PeerLost
from services.trainer.report import Iteration, make_row, send_iteration, send_train_steps
from services.trainer.rollout_client import Received, StoppedWaiting
from services.trainer.row import show_row
from services.trainer.row_writer import RowWriter
from services.trainer.session import Session
from services.trainer.status import Status

log = structlog.get_logger()

FLUSH_LIMIT_S = 1.0
"""How long a checkpoint may wait for the metrics service to have the iteration's numbers on disk."""


@dataclass(frozen=True)
class Parts:
    """What the loop works with."""

    config: RunConfig
    backend: Backend
    session: Session
    checkpoints: Checkpoints
    telemetry: Telemetry
    rows: RowWriter
    status: Status
    stop: StopSignal
    num_devices: int
    fingerprint: Mapping[str, str]
    advisory: Mapping[str, str]
    poll_stop: Callable[[], None]
    """Hears a stop that was asked of another rank."""


@dataclass(frozen=True)
class _Trained:
    """One iteration before it is told."""

    received: Received
    trained: TrainResult
    published: Published


class Loop:
    """A run from one rollout id to its end."""

    def __init__(self, parts: Parts, *, start: int, evaluation_owed: bool) -> None:
        """evaluation_owed: the weights to start with were not evaluated yet."""
        self._parts = parts
        self._start = start
        self._evaluation_owed = evaluation_owed and bool(parts.config.run.eval_interval)
        self._done = start
        """Rollouts trained."""
        self._saved: int | None = None
        self._stop_seen = math.inf
        """When a stop was first seen, on the monotonic clock."""

    def run(self) -> ExitCode:
        """Train the rollouts that are left; how it ended."""
        try:
            self._iterate()
        except StoppedWaiting:
            log.info("stopped_waiting_for_rollout", next_rollout_id=self._done)
        except PeerLost:  # rollout is gone for good: what is trained is kept
            log.error("saving_before_giving_up", next_rollout_id=self._done)
            self._end()
            raise
        return self._end()

    def _iterate(self) -> None:
        parts = self._parts
        if self._evaluation_owed:
            self._make_up_for_evaluation()
        began = time.monotonic()
        parts.status.take_seconds()
        for rollout_id in range(self._start, parts.config.run.num_rollout):
            if self._must_stop():
                return
            structlog.contextvars.bind_contextvars(rollout_id=rollout_id)
            parts.status.update(rollout_id=rollout_id)
            with parts.status.stage("waiting_for_samples"), self._giving_up() as give_up:
                received = parts.session.next_batch(rollout_id, give_up=give_up)
            iteration = self._train_and_publish(rollout_id, received)
            if self._evaluation_owed:
                self._evaluate(rollout_id)
            began = self._save_and_tell(rollout_id, iteration, began)

    def _must_stop(self) -> bool:
        self._parts.poll_stop()
        asked = self._parts.stop.requested.is_set()
        if asked:
            self._stop_seen = min(self._stop_seen, time.monotonic())
        return asked

    @contextlib.contextmanager
    def _giving_up(self) -> Generator[threading.Event]:
        """Set when a wait for rollout should end: once half the drain budget is over since a stop was asked for."""
        give_up, over = threading.Event(), threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                if self._must_stop() and time.monotonic() - self._stop_seen > self._parts.config.run.drain_budget_s / 2:
                    give_up.set()
                    return

        threading.Thread(target=watch, name="stop-watch", daemon=True).start()
        try:
            yield give_up
        finally:
            over.set()

    def _train_and_publish(self, rollout_id: int, received: Received) -> _Trained:
        parts = self._parts
        finished_before = parts.backend.train_step
        with parts.status.stage("training"):
            batch = make_batch(received.groups, rollout_id=rollout_id, policy_version=rollout_id, rules=self._rules())
            trained = parts.backend.train(batch)
        self._done = rollout_id + 1
        self._evaluation_owed = self._evaluation_is_due(rollout_id)
        send_train_steps(parts.telemetry, trained.steps, finished_before=finished_before, rollout_id=rollout_id)
        with parts.status.stage("publishing"), self._giving_up() as give_up:
            published = parts.session.publish(rollout_id + 1, give_up=give_up)
        parts.status.update(policy_version=rollout_id + 1, train_step=parts.backend.train_step)
        log.info("weights_published", policy_version=rollout_id + 1, seconds=round(published.seconds, 4))
        return _Trained(received, trained, published)

    def _rules(self) -> BatchRules:
        config = self._parts.config
        return BatchRules(
            num_steps=config.run.num_steps_per_rollout or 1,
            vocabulary_size=self._parts.backend.vocabulary_size,
            normalize_by_std=not config.trainer.disable_grpo_std_normalization,
            require_rollout_log_probs=config.trainer.use_rollout_logprobs,
        )

    def _tell(self, done: _Trained, began: float) -> float:
        """Send the row's numbers and show the row; when the next iteration began."""
        parts, config = self._parts, self._parts.config
        now = time.monotonic()
        iteration = Iteration(
            rollout_id=done.received.summary.rollout_id,
            summary=done.received.summary,
            trained=done.trained,
            published=done.published,
            seconds=parts.status.take_seconds(),
            step_time_s=now - began,
            num_devices=parts.num_devices,
            peak_flops=parts.backend.peak_flops,
        )
        send_iteration(parts.telemetry, iteration)
        row = make_row(iteration, num_rollout=config.run.num_rollout, use_kl_loss=config.trainer.use_kl_loss)
        parts.rows.write(show_row(row, as_json=config.run.log_format == "json"))
        return now

    def _save_and_tell(self, rollout_id: int, iteration: _Trained, began: float) -> float:
        """Save if due, and tell; when the next iteration began.

        An iteration's numbers are on disk in the metrics service before its checkpoint counts: a kill in between
        repeats the iteration, and loses no row.
        """
        run, telemetry = self._parts.config.run, self._parts.telemetry
        last = rollout_id + 1 == run.num_rollout
        if not last and (not run.save_interval or (rollout_id + 1) % run.save_interval):
            return self._tell(iteration, began)
        next_began = began

        def tell() -> None:
            nonlocal next_began
            next_began = self._tell(iteration, began)
            if telemetry.stats.connected:  # else the spool has them: training does not wait for a service that is away
                telemetry.flush(FLUSH_LIMIT_S)

        self._save(rollout_id, before_commit=tell)
        return next_began

    def _save(self, rollout_id: int, *, before_commit: Callable[[], None] = lambda: None) -> None:
        parts = self._parts
        saving = contextlib.ExitStack()

        def told() -> None:
            saving.close()  # the row shows how long the writing took
            before_commit()

        with saving:
            saving.enter_context(parts.status.stage("saving"))
            state = parts.backend.state()
            assert state is not None  # rank 0 has it
            meta = Meta(
                rollout_id=rollout_id,
                policy_version=rollout_id + 1,
                train_step=state.train_step,
                skipped_steps=state.skipped_steps,
                fingerprint=parts.fingerprint,
                advisory=parts.advisory,
                evaluation_owed=self._evaluation_owed,
            )
            write = checkpoint_writer(state, parts.config.model)
            parts.checkpoints.save(meta, rollout_state=parts.session.state, write=write, before_commit=told)
            parts.session.commit_checkpoint(rollout_id)
        self._saved = rollout_id
        parts.status.update(checkpoint_rollout_id=rollout_id)
        log.info("checkpoint_saved", checkpoint_rollout_id=rollout_id)

    def _evaluation_is_due(self, rollout_id: int) -> bool:
        run = self._parts.config.run
        if not run.eval_interval:
            return False
        return rollout_id + 1 == run.num_rollout or (rollout_id + 1) % run.eval_interval == 0

    def _make_up_for_evaluation(self) -> None:
        """Evaluate the weights to start with. When nothing is left to train, the checkpoint says so from now on."""
        self._evaluate(self._start - 1)
        if not self._evaluation_owed and 0 < self._parts.config.run.num_rollout <= self._start:
            self._save(self._start - 1)

    def _evaluate(self, rollout_id: int) -> None:
        """Evaluate the weights that are published. A stop ends it after a while; then it stays owed."""
        parts = self._parts
        try:
            with parts.status.stage("evaluating"), self._giving_up() as give_up:
                answer = parts.session.evaluate(rollout_id, rollout_id + 1, give_up=give_up)
        except StoppedWaiting:
            log.warning("evaluation_put_off", rollout_id=rollout_id)
            return
        self._evaluation_owed = False
        for result in answer.results:
            reward = result.reward_sum / result.reward_count if result.reward_count else None
            log.info("evaluated", set=result.name, reward=reward, num_samples=result.num_samples)

    def _end(self) -> ExitCode:
        """Save what is not saved yet; the exit code."""
        stop, done = self._parts.stop, self._done
        if done > self._start and self._saved != done - 1:
            if stop.code is ExitCode.DIVERGED:  # not worth keeping, and it would push a sound checkpoint out
                log.warning("checkpoint_not_saved", rollout_id=done - 1, reason=stop.reason)
            else:
                self._save(done - 1)
        finished = done >= self._parts.config.run.num_rollout and not self._evaluation_owed
        if stop.requested.is_set() and not (finished and stop.code is ExitCode.DRAINED):
            return ExitCode(stop.code)
        return ExitCode.DONE
