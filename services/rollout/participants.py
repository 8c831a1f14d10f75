"""The engines that take part in a weight update, and doing one thing on all of them at once.

A thing is bounded in time, ends at once on an engine that dies, and what went wrong is told by engine and step.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.engine_http import EngineCallFailed, EngineHttp
from services.rollout.fleet import Engine, Fleet
from services.rollout.verification import WrongBytes
from services.rollout.weight_plan import Member

GRACE_S = 1.0


@dataclass(frozen=True)
class Participant:
    """An engine that takes part in an update, as it was at Begin."""

    engine: Engine
    incarnation: int
    rank: int
    """In the process group, from 1: the trainer is 0."""
    http: EngineHttp

    @property
    def member(self) -> Member:
        return Member(self.engine.engine_id, self.incarnation)

    @property
    def is_same(self) -> bool:
        """Whether it is still the process that took part, and alive."""
        return self.engine.incarnation == self.incarnation and self.engine.answers


@dataclass(frozen=True)
class Failure:
    """What went wrong on one engine."""

    step: str
    problem: str
    wrong_bytes: bool = False
    """It answered, and holds other bytes than were sent."""
    too_late: bool = False
    """It did not answer in time."""


async def do_on_all(
    fleet: Fleet,
    participants: Sequence[Participant],
    one: Callable[[Participant], Awaitable[None]],
    *,
    limit_s: float,
    together: bool = False,
) -> dict[str, Failure]:
    """Do a thing on all engines; the failures by engine. Returns after limit_s seconds at the latest.

    together: it is a collective, so that once one engine has failed the others are not waited for.
    """
    failed = asyncio.Event()
    results = await asyncio.gather(
        *(_guarded(fleet, participant, one, limit_s, failed if together else None) for participant in participants)
    )
    return {
        participant.engine.engine_id: result
        for participant, result in zip(participants, results, strict=True)
        if result is not None
    }


async def _guarded(
    fleet: Fleet,
    participant: Participant,
    one: Callable[[Participant], Awaitable[None]],
    limit_s: float,
    failed: asyncio.Event | None,
) -> Failure | None:
    work = asyncio.ensure_future(one(participant))
    ends: set[asyncio.Future[Any]] = {asyncio.ensure_future(fleet.wait_until(lambda: not participant.is_same))}
    if failed is not None:
        ends.add(asyncio.ensure_future(_grace_after(failed)))
    try:
        await asyncio.wait({work, *ends}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        failure = _judge(work, participant, limit_s, given_up=failed is not None and failed.is_set())
        if failure is not None and failed is not None:
            failed.set()
        return failure
    finally:
        for task in (work, *ends):
            task.cancel()
        work.add_done_callback(_forget)


def _judge(work: "asyncio.Future[None]", participant: Participant, limit_s: float, *, given_up: bool) -> Failure | None:
    if work.done():
        try:
            return work.result()
        except EngineCallFailed as error:
            return Failure(error.step, error.problem, too_late=error.too_late)
        except WrongBytes as error:
            return Failure("verify", str(error), wrong_bytes=True)
    if not participant.is_same:
        return Failure("engine", participant.engine.why_gone or "it is gone")
    if given_up:
        return Failure("engine", "not waited for, since another engine failed")
    return Failure("engine", f"no answer within {limit_s:g} s", too_late=True)


def _forget(work: "asyncio.Future[None]") -> None:
    """What it came to after its limit is of no interest, and not worth asyncio's complaint."""
    if not work.cancelled():
        work.exception()


async def _grace_after(failed: asyncio.Event) -> None:
    """So that engines that fail for the same reason can say so too."""
    await failed.wait()
    await asyncio.sleep(GRACE_S)


def name_failures(failures: Mapping[str, Failure]) -> str:
    """Engine, step and problem of each failure, for an error."""
    return "; ".join(f"{engine}: {failure.step} failed: {failure.problem}" for engine, failure in failures.items())
