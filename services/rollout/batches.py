"""Which rollout comes next, from which prompts: the idempotent answer to NextBatch, and the state behind a checkpoint.

A batch is durable before it is answered, so the same id gives the same samples until a checkpoint is committed, also
when this service was killed in between. A failed rollout moves nothing: asked again, it draws the same prompts. Each
batch is reported once an attempt: its report is noted before the batch is kept, and sent after.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import grpc
import orjson
import structlog

from furlong.v1 import rollout_pb2, sample_pb2
from services.rollout.batch_reports import BatchReports
from services.rollout.batch_store import BatchStore, Details, Journal, KeptBatch
from services.rollout.feed import Draw, FeedPosition, PromptFeed
from services.rollout.refusal import Refused

log = structlog.get_logger()

STATE_FORMAT = 1
RESTORE_LIMIT_S = 10.0
"""How long a restore waits for what is being made or written."""

T = TypeVar("T")


@dataclass(frozen=True)
class NewBatch:
    """A rollout just made, before it is kept."""

    groups: list[sample_pb2.Group]
    summary: rollout_pb2.BatchSummary
    weights_digest: str
    values: dict[str, list[object]]
    details: Details


MakeBatch = Callable[[int, int, list[Draw]], Awaitable[NewBatch]]
"""(rollout_id, policy_version, draws) -> the rollout."""


class Batches:
    """The rollouts of a run, in order."""

    def __init__(
        self,
        store: BatchStore,
        feed: PromptFeed,
        *,
        batch_size: int,
        settings: str,
        make: MakeBatch,
        reports: BatchReports,
    ) -> None:
        self._store = store
        self._feed = feed
        self._batch_size = batch_size
        self._settings = settings
        self._make = make
        self._reports = reports
        self._running: dict[int, asyncio.Task[tuple[KeptBatch, bool]]] = {}
        self._base = 0  # first rollout after the last durable checkpoint
        self._next = 0  # next one to be made
        self._position: FeedPosition | None = None  # before the draw of _next; None: never restored
        self.attempt = 1
        self.last_asked: int | None = None
        self._resume_from_journal()

    @property
    def next_rollout_id(self) -> int:
        """The rollout that will be made next."""
        return self._next

    @property
    def first_rollout_id(self) -> int:
        """The first rollout after the last durable checkpoint."""
        return self._base

    @property
    def num_groups_drawn(self) -> int:
        """Groups drawn so far."""
        return self._position.num_groups if self._position else 0

    @property
    def is_restored(self) -> bool:
        """Whether it is known where the run is."""
        return self._position is not None

    @property
    def is_making(self) -> bool:
        """Whether a rollout is under way."""
        return bool(self._running)

    async def next_batch(self, rollout_id: int, policy_version: int, *, weights_digest: str) -> tuple[KeptBatch, bool]:
        """The batch, and whether it is a repeated answer. Raises Refused, and what making it raises.

        weights_digest: names the weights that are served now, empty for none. A caller that goes away while it waits
        loses nothing: the next one joins.
        """
        if self._position is None:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, "RestoreState must be called first, once, by the trainer"
            )
        self.last_asked = rollout_id
        task = self._running.get(rollout_id)
        if task is None:
            kept = self._kept(rollout_id, weights_digest)
            if kept is not None and kept.attempt == self.attempt:
                return kept, True
            if kept is None and rollout_id != self._next:
                raise Refused(
                    grpc.StatusCode.OUT_OF_RANGE,
                    f"rollout_id must be the current one ({self._next}) or a kept one ({self._store.ids() or 'none'}), "
                    f"got {rollout_id}",
                )
            work = self._make_and_keep(rollout_id, policy_version) if kept is None else self._keep_again(kept)
            task = asyncio.create_task(work, name=f"rollout-{rollout_id}")
            self._running[rollout_id] = task
            task.add_done_callback(lambda done: self._ended(rollout_id, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Refused(grpc.StatusCode.ABORTED, "the rollout was given up: the state was restored") from None
            raise

    def save(self, rollout_id: int) -> bytes:
        """The state after a rollout. Raises Refused."""
        position = self._position_after(rollout_id)
        if position is None:
            rule = f"the state after rollout {rollout_id} is not known: the last one made is {self._next - 1}"
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, rule)
        return orjson.dumps({"format": STATE_FORMAT, "rollout_id": rollout_id, "position": asdict(position)})

    async def restore(self, state: bytes | None, next_rollout_id: int, attempt: int) -> list[str]:
        """Go back to a state, or to the start; warnings for the user. Raises Refused."""
        position, warning = self._adopt(state, next_rollout_id)
        for task in list(self._running.values()):
            task.cancel()
        if self._running:
            _, late = await asyncio.wait(self._running.values(), timeout=RESTORE_LIMIT_S)
            if late:
                names = ", ".join(task.get_name() for task in late)
                raise Refused(
                    grpc.StatusCode.UNAVAILABLE, f"{names} did not end within {RESTORE_LIMIT_S:g} s; ask again"
                )
        self.attempt = attempt
        self._base = self._next = next_rollout_id
        self._position = position
        self._write_journal(position)
        self._follow_kept()
        log.info(
            "state_restored",
            next_rollout_id=next_rollout_id,
            attempt=attempt,
            num_kept=self._next - self._base,
            epoch=position.epoch,
            offset=position.offset,
            warning=warning,
        )
        return [warning] if warning else []

    def commit(self, rollout_id: int) -> None:
        """A checkpoint that holds a rollout is durable. Safe to repeat. Raises Refused for one that was never made."""
        if rollout_id < self._base:
            return
        position = self._position_after(rollout_id)
        if position is None:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"rollout {rollout_id} was not made here")
        self._base = rollout_id + 1
        self._write_journal(position)
        self._store.forget(up_to=rollout_id)

    def will_report(self, rollout_id: int, attempt: int) -> bool:
        """Whether a report that was noted is sent in any case, once the rollout is made or given again."""
        if attempt != self.attempt or rollout_id < self._base:
            return False
        kept = self._store.read(rollout_id) if rollout_id < self._next else None
        return kept is None or kept.attempt != attempt

    async def close(self) -> None:
        """Give up what is being made."""
        for task in list(self._running.values()):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=5.0)

    # -- making ------------------------------------------------------------------------------------------------------

    async def _make_and_keep(self, rollout_id: int, policy_version: int) -> tuple[KeptBatch, bool]:
        before = self._position
        assert before is not None
        draws, after = self._feed.draw(before, self._batch_size)
        started = time.monotonic()
        made = await self._make(rollout_id, policy_version, draws)
        batch = KeptBatch(
            rollout_id=rollout_id,
            groups=made.groups,
            summary=made.summary,
            before=before,
            after=after,
            settings=self._settings,
            weights_digest=made.weights_digest,
            attempt=self.attempt,
            values=made.values,
            details=made.details,
        )
        await _to_the_end(self._keep(batch))
        self._next, self._position = rollout_id + 1, after
        log.info(
            "rollout_made",
            rollout_id=rollout_id,
            policy_version=policy_version,
            num_samples=made.summary.num_samples,
            seconds=time.monotonic() - started,
        )
        return batch, False

    async def _keep_again(self, batch: KeptBatch) -> tuple[KeptBatch, bool]:
        """Report a batch of an earlier attempt in this one too."""
        batch = replace(batch, attempt=self.attempt)
        await _to_the_end(self._keep(batch))
        return batch, True

    async def _keep(self, batch: KeptBatch) -> None:
        """In this order: a kill in between leaves no batch without a report, and no report without its batch."""

        def write() -> None:
            self._reports.note(batch)
            self._store.write(batch)

        await asyncio.to_thread(write)
        self._reports.send(batch)

    def _ended(self, rollout_id: int, task: "asyncio.Task[tuple[KeptBatch, bool]]") -> None:
        self._running.pop(rollout_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:  # also when nobody waits any more
            log.error("rollout_failed", rollout_id=rollout_id, error=str(error))

    def _kept(self, rollout_id: int, weights_digest: str) -> KeptBatch | None:
        if not self._base <= rollout_id < self._next:
            return None
        kept = self._store.read(rollout_id)
        if kept is None:
            return self._step_back_to(rollout_id, None)
        other = bool(weights_digest) and kept.weights_digest != weights_digest
        if other and rollout_id == self._base:  # weights read from a checkpoint must be what they were
            log.warning("kept_batches_of_other_weights", rollout_id=rollout_id, forgotten=self._next - rollout_id)
            return self._step_back_to(rollout_id, kept.before)
        return kept

    def _step_back_to(self, rollout_id: int, before: FeedPosition | None) -> None:
        """Forget a rollout and those after it; they are made anew."""
        if before is None:
            previous = self._store.read(rollout_id - 1) if rollout_id > self._base else None
            journal = self._store.read_journal()
            if previous is not None:
                before = previous.after
            elif journal is not None and journal.next_rollout_id == rollout_id:
                before = journal.position
        if before is None:
            raise Refused(
                grpc.StatusCode.DATA_LOSS, f"the kept batch of rollout {rollout_id} is damaged; restore a checkpoint"
            )
        self._store.forget(since=rollout_id)
        self._next, self._position = rollout_id, before

    # -- state -------------------------------------------------------------------------------------------------------

    def _adopt(self, state: bytes | None, next_rollout_id: int) -> tuple[FeedPosition, str]:
        if state is None:
            if next_rollout_id != 0:
                rule = f"a run that goes on at rollout {next_rollout_id} needs the state of its checkpoint"
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, rule)
            return self._feed.start(), ""
        try:
            tree = orjson.loads(state)
            if tree["format"] != STATE_FORMAT:
                raise ValueError(f"format {tree['format']}, this version reads {STATE_FORMAT}")
            saved = FeedPosition(**tree["position"])
        except (ValueError, KeyError, TypeError) as error:
            rule = f"the rollout state of the checkpoint cannot be read: {error!r}"
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, rule) from error
        return self._feed.adopt(saved)

    def _resume_from_journal(self) -> None:
        """This service was restarted while its trainer went on: be where it was."""
        journal = self._store.read_journal()
        if journal is None or journal.settings != self._settings:
            return
        position, warning = self._feed.adopt(journal.position)
        if warning:
            return  # other data: wait for the trainer to restore, so that the user is told
        self.attempt = journal.attempt
        self._base = self._next = journal.next_rollout_id
        self._position = position
        self._follow_kept()
        log.info("journal_resumed", next_rollout_id=self._next, first_kept=self._base)

    def _follow_kept(self) -> None:
        """Take the kept batches that go on from here; forget the others."""
        while (kept := self._store.read(self._next)) is not None:
            if kept.before != self._position or kept.settings != self._settings:
                break
            self._next, self._position = self._next + 1, kept.after
        forgotten = self._store.forget(since=self._next)
        if forgotten:
            log.info("kept_batches_forgotten", rollout_ids=forgotten)

    def _position_after(self, rollout_id: int) -> FeedPosition | None:
        if self._position is not None and rollout_id == self._next - 1:
            return self._position
        if self._base <= rollout_id < self._next:
            kept = self._store.read(rollout_id)
            return kept.after if kept else None
        return None

    def _write_journal(self, position: FeedPosition) -> None:
        self._store.write_journal(Journal(self.attempt, self._base, position, self._settings))


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:  # Any: what a coroutine is sent
    """Its result, also when the task that waits is cancelled: what is half written is finished first."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()
