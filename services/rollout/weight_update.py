"""Carries a weight update out on the engines: one at a time, every step bounded, every failure leaving engines out.

An engine becomes READY here and nowhere else, and only after it has shown that it holds all bytes of one version. The
rules of the sequence stand in weight_plan.py.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import grpc
import structlog

from furlong.addresses import NotReachable
from furlong.checksum import bytes_checksum
from furlong.config import RunConfig
from furlong.v1 import rollout_pb2
from services.rollout.engine_dialect import CpuDialect, EngineDialect, SglangDialect
from services.rollout.engine_http import EngineHttp
from services.rollout.fleet import READY, UPDATING, WAITING, Fleet, protos
from services.rollout.participants import Failure, Participant, do_on_all, name_failures
from services.rollout.refusal import Refused
from services.rollout.router_link import RouterLink
from services.rollout.verification import Parts, find_contradiction
from services.rollout.weight_groups import WeightGroups
from services.rollout.weight_plan import (
    UpdatePlan,
    check_begin,
    check_bucket,
    check_commit,
    check_join,
    check_open,
)

log = structlog.get_logger()

T = TypeVar("T")


@dataclass
class Update:
    """The update that is open, or was last."""

    plan: UpdatePlan
    participants: list[Participant]
    group_name: str
    started: float
    last_call_ended: float
    running: "asyncio.Task[object] | None" = None
    watchdog: "asyncio.Task[None] | None" = None


class WeightUpdates:
    """The weight updates of this rollout service, one after another."""

    def __init__(self, config: RunConfig, fleet: Fleet, router: RouterLink, session: aiohttp.ClientSession) -> None:
        sglang = config.rollout.rollout_engine == "sglang"
        self._dialect: EngineDialect = SglangDialect() if sglang else CpuDialect()
        self._ranks_per_engine = config.rollout.rollout_num_gpus_per_engine
        self._groups = WeightGroups(fleet, run=config.run.name)
        self._fleet = fleet
        self._router = router
        self._session = session
        self._update: Update | None = None
        self._last_told: Parts = {}
        self._lock = asyncio.Lock()
        self.newest_version: int | None = None
        """The newest version published, or the floor that RestoreState set. Never goes back in between."""
        self.weights_digest = ""
        """Names the bytes of the version that is served. Empty: none yet."""

    @property
    def is_open(self) -> bool:
        """Whether an update is under way."""
        return self._update is not None and not self._update.plan.closed

    async def begin(self, request: rollout_pb2.BeginWeightUpdateRequest) -> rollout_pb2.BeginWeightUpdateResponse:
        """Open an update. Raises Refused."""
        async with self._lock:
            check_begin(request, newest_version=self.newest_version)
            await self._give_up("a newer update was begun")
            started = time.monotonic()
            candidates = await self._candidates(request.timeout_s)
            try:
                update = await self._begin_with(candidates, request, started)
            except BaseException:  # cancelled too: the trainer may hang up at any moment
                for one in candidates:
                    if one.is_same:
                        self._fleet.set_state(one.engine, WAITING)
                raise
        log.info(
            "weight_update_begun",
            policy_version=update.plan.policy_version,
            update_id=update.plan.update_id,
            engines=[one.engine.engine_id for one in update.participants],
            group_is_new=update.plan.group_is_new,
        )
        return rollout_pb2.BeginWeightUpdateResponse(
            update_id=update.plan.update_id,
            group_name=update.group_name,
            world_size=self._world_size(update),
            group_is_new=update.plan.group_is_new,
            engines=protos(one.engine for one in update.participants),
        )

    async def _begin_with(
        self, candidates: Sequence[Participant], request: rollout_pb2.BeginWeightUpdateRequest, started: float
    ) -> Update:
        for one in candidates:
            self._fleet.set_state(one.engine, UPDATING)
        await self._settle_router(_left(started, request.timeout_s) / 2)
        participants = await self._prepare(candidates, _left(started, request.timeout_s))
        limit_s = _left(started, request.timeout_s)
        group_name, is_new = await self._groups.choose(participants, request, limit_s=limit_s)
        plan = UpdatePlan(uuid.uuid4().hex, request, is_new)
        update = Update(plan, participants, group_name, started, time.monotonic())
        self._update = update
        update.watchdog = asyncio.create_task(self._watch(update), name="weight-update-watchdog")
        return update

    async def join(self, update_id: str) -> float:
        """Have all engines join the group; seconds. Raises Refused."""
        update = self._open(update_id)
        check_join(update.plan)
        request = update.plan.request
        self._groups.note_joining(update.participants)

        async def one(participant: Participant) -> None:
            body = {
                "master_address": request.master_address,
                "master_port": request.master_port,
                "rank_offset": participant.rank,
                "world_size": self._world_size(update),
                "group_name": update.group_name,
                "backend": request.backend,
                **self._dialect.limit(update.plan),
            }
            await participant.http.post("/init_weights_update_group", body, timeout_s=update.plan.timeout_s)
            participant.engine.group_rank = participant.rank

        seconds = await self._step(update, "join the group", one)
        update.plan.joined = True
        return seconds

    async def receive(self, update_id: str, index: int) -> float:
        """Have all engines receive a bucket; seconds. Raises Refused."""
        update = self._open(update_id)
        check_bucket(update.plan, index)
        bucket = update.plan.bucket(index)
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": update.group_name,
            "load_format": "flattened_bucket",
            "flush_cache": bucket.is_last,
            **self._dialect.limit(update.plan),
        }

        async def one(participant: Participant) -> None:
            await participant.http.post("/update_weights_from_distributed", body, timeout_s=update.plan.timeout_s)

        seconds = await self._step(update, f"receive bucket {index}", one)
        update.plan.num_received += 1
        return seconds

    async def commit(self, request: rollout_pb2.CommitWeightUpdateRequest) -> rollout_pb2.CommitWeightUpdateResponse:
        """Verify and serve the new version. Raises Refused."""
        update = self._open(request.update_id)
        checksums = check_commit(update.plan, request)
        update.running = asyncio.ensure_future(self._commit_all(update, checksums))
        try:
            await self._bounded(update, update.running)
        finally:
            update.running, update.last_call_ended = None, time.monotonic()
        seconds = time.monotonic() - update.started
        served = self._fleet.ready(update.plan.policy_version)
        log.info(
            "weights_published",
            policy_version=update.plan.policy_version,
            engines=[engine.engine_id for engine in served],
            seconds=seconds,
        )
        return rollout_pb2.CommitWeightUpdateResponse(
            engines=protos(served), seconds=seconds, verification=self._dialect.verification
        )

    async def abort(self, update_id: str, reason: str) -> None:
        """Give an update up; whichever is open if update_id is empty. An unknown one is left alone."""
        if self._update is not None and update_id in ("", self._update.plan.update_id):
            await self._give_up(reason or "aborted by the trainer")

    def restart_versions(self, next_version: int) -> None:
        """A trainer starts from a checkpoint: versions go on from there."""
        self.newest_version = next_version

    async def close(self) -> None:
        """Give up whatever is open."""
        await self._give_up("the rollout service stops")

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _open(self, update_id: str) -> Update:
        check_open(self._update.plan if self._update else None, update_id)
        assert self._update is not None
        if self._update.running is not None:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "another call of this update is still running")
        return self._update

    def _world_size(self, update: Update) -> int:
        """Trainer rank 0 and every rank of every engine."""
        return 1 + len(update.participants) * self._ranks_per_engine

    async def _candidates(self, timeout_s: float) -> list[Participant]:
        """The engines that answer; waits for one if all are only just starting. Raises Refused."""
        engines = self._fleet.engines
        await self._fleet.wait_until(lambda: any(engine.answers for engine in engines), timeout_s=timeout_s)
        answering = [engine for engine in engines if engine.answers]
        if not answering:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"no engine is there: {self._fleet.describe_losses()}")
        return [
            Participant(engine, engine.incarnation, 0, EngineHttp(self._session, engine.engine_id, engine.url))
            for engine in answering
        ]

    async def _settle_router(self, timeout_s: float) -> None:
        """No request may reach an engine from here on. A router that is away routes nothing."""
        try:
            await self._router.settle(min(timeout_s, 10.0))
        except NotReachable as error:
            log.warning("weight_update_without_router", error=str(error))

    async def _prepare(self, candidates: Sequence[Participant], timeout_s: float) -> list[Participant]:
        """Stop generation and open the engines' sessions; those that did, ranked. Raises Refused if none did."""

        async def one(participant: Participant) -> None:
            http = participant.http
            await http.post("/pause_generation", {"mode": "abort"}, timeout_s=timeout_s)
            await self._dialect.open_session(http, timeout_s=timeout_s)

        failures = await do_on_all(self._fleet, candidates, one, limit_s=timeout_s)
        good = [one for one in candidates if one.engine.engine_id not in failures]
        self._leave_out(candidates, failures)
        if not good:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"no engine is left: {name_failures(failures)}")
        return [
            Participant(one.engine, one.incarnation, 1 + position * self._ranks_per_engine, one.http)
            for position, one in enumerate(good)
        ]

    async def _step(self, update: Update, what: str, one: Callable[[Participant], Awaitable[None]]) -> float:
        """One collective step on all engines. They share a process group, so one that fails fails the update."""
        started = time.monotonic()
        work = do_on_all(self._fleet, update.participants, one, limit_s=update.plan.timeout_s, together=True)
        update.running = asyncio.ensure_future(work)
        try:
            failures = await self._bounded(update, update.running)
        finally:
            update.running, update.last_call_ended = None, time.monotonic()
        if failures:
            message = f"the engines could not {what}: {name_failures(failures)}"
            await self._give_up(message, failures=failures)
            code = (
                grpc.StatusCode.DEADLINE_EXCEEDED
                if all(failure.too_late for failure in failures.values())
                else grpc.StatusCode.UNAVAILABLE
            )
            raise Refused(code, f"{message}. The update was given up; begin it again.")
        return time.monotonic() - started

    async def _bounded(self, update: Update, task: "asyncio.Future[T]") -> T:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # the update was given up meanwhile
                raise Refused(
                    grpc.StatusCode.ABORTED, f"weight update {update.plan.update_id} was given up: {update.plan.closed}"
                ) from None
            task.cancel()  # the trainer hung up: what it asked for must not go on
            await self._give_up("the trainer ended a call before its answer")
            raise

    async def _commit_all(self, update: Update, checksums: Mapping[str, str]) -> None:
        plan, started = update.plan, time.monotonic()
        told: dict[str, Parts] = {}

        async def one(participant: Participant) -> None:
            parts = await self._dialect.commit(participant.http, plan, checksums, self._last_told)
            told[participant.engine.engine_id] = parts
            await participant.http.post("/continue_generation", {}, timeout_s=plan.timeout_s)

        failures = await do_on_all(self._fleet, update.participants, one, limit_s=plan.timeout_s)
        told = {engine: parts for engine, parts in told.items() if engine not in failures}
        if contradiction := find_contradiction(told):  # nobody can say which of them is right
            failures |= {engine: Failure("verify", contradiction, wrong_bytes=True) for engine in told}
        self._leave_out(update.participants, failures)
        good = [p for p in update.participants if p.engine.engine_id not in failures and p.is_same]
        if failures:
            self._groups.forget()  # it has members that are out
        if not good:
            reason = f"no engine holds the new weights: {name_failures(failures)}"
            await self._close_update(update, reason)
            wrong = any(failure.wrong_bytes for failure in failures.values())
            raise Refused(grpc.StatusCode.DATA_LOSS if wrong else grpc.StatusCode.UNAVAILABLE, reason)
        self.newest_version = plan.policy_version
        self.weights_digest = _digest_of(checksums)
        self._last_told = next(iter(told.values()), {})
        for participant in good:
            self._fleet.set_state(participant.engine, READY, policy_version=plan.policy_version)
        await self._close_update(update, "committed")
        if not await self._router.wait_routable(plan.policy_version, timeout_s=_left(started, plan.timeout_s)):
            log.warning("weights_published_without_router", policy_version=plan.policy_version)
        if any(failure.wrong_bytes for failure in failures.values()):
            served = ", ".join(one.engine.engine_id for one in good)
            raise Refused(grpc.StatusCode.DATA_LOSS, f"{name_failures(failures)}. The version is served by {served}.")

    # -- giving up ---------------------------------------------------------------------------------------------------

    async def _give_up(self, reason: str, *, failures: Mapping[str, Failure] | None = None) -> None:
        """Close the open update, if there is one: its engines stay out, its group is not used again."""
        update = self._update
        if update is None or update.plan.closed:
            return
        await self._close_update(update, reason)
        if update.running is not None and not update.running.done():
            update.running.cancel()
            await asyncio.wait({update.running}, timeout=1.0)
        self._groups.forget()
        for participant in update.participants:
            if participant.is_same:
                self._fleet.set_state(participant.engine, WAITING)
        self._leave_out(update.participants, failures or {})
        log.warning(
            "weight_update_given_up",
            policy_version=update.plan.policy_version,
            update_id=update.plan.update_id,
            reason=reason,
        )

    async def _close_update(self, update: Update, how: str) -> None:
        update.plan.closed = how
        if update.watchdog is not None and update.watchdog is not asyncio.current_task():
            update.watchdog.cancel()

    async def _watch(self, update: Update) -> None:
        """Give the update up when the trainer has been quiet for longer than its own limit."""
        limit_s = update.plan.timeout_s
        while not update.plan.closed:
            quiet_s = time.monotonic() - update.last_call_ended
            if update.running is None and quiet_s >= limit_s:
                await self._give_up(f"the trainer was quiet for {quiet_s:.1f} s (limit {limit_s:g} s)")
                return
            await asyncio.sleep(limit_s / 20 if update.running is not None else max(0.01, limit_s - quiet_s))

    def _leave_out(self, participants: Sequence[Participant], failures: Mapping[str, Failure]) -> None:
        """Engines that failed hold no known version; one that did not even answer is ended, to start anew."""
        for participant in participants:
            failure = failures.get(participant.engine.engine_id)
            if failure is None or not participant.is_same:
                continue
            self._fleet.set_state(participant.engine, WAITING)
            log.error("engine_left_out", engine=participant.engine.engine_id, step=failure.step, error=failure.problem)
            if failure.too_late:
                self._fleet.end_process(participant.engine, f"no answer to {failure.step}")


def _left(started: float, limit_s: float) -> float:
    """What is left of a limit, at least a tenth of it: the steps before took their part."""
    return max(limit_s / 10, limit_s - (time.monotonic() - started))


def _digest_of(checksums: Mapping[str, str]) -> str:
    text = "|".join(f"{name}={digest}" for name, digest in sorted(checksums.items()))
    return bytes_checksum(text.encode())
