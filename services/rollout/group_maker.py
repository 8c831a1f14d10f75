"""Makes groups: for every prompt drawn, its samples and their rewards, many at once, in the order of the draws.

What it gives depends on ids and seeds only, never on which answer came first. Only so many samples are asked for at
once.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.v1 import sample_pb2
from services.rollout.feed import Draw
from services.rollout.generation import Ask, Generator, fail
from services.rollout.metrics import Incidents
from services.rollout.rewards import RewardFunction
from services.rollout.sample_view import Sample, view_sample
from services.rollout.seeds import SeedScope

_REWARDED = (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)


@dataclass(frozen=True)
class MakePlan:
    """What is the same for all groups of one rollout or evaluation."""

    rollout_id: int
    policy_version: int
    group_size: int
    sampling_params: Mapping[str, Any]  # Any: SGLang's sampling parameters
    scope: SeedScope

    def seed(self, group_index: int, sample_index: int, retry: int) -> int:
        """The sampling seed of one sample."""
        return self.scope.sampling_seed(
            rollout_id=self.rollout_id, group_index=group_index, sample_index=sample_index, retry=retry
        )


@dataclass(frozen=True)
class MadeGroup:
    """One group, and what only this process knows of it."""

    group: sample_pb2.Group
    draw: Draw
    incidents: Incidents
    details: tuple[Mapping[str, Any] | None, ...]  # Any: dicts of the user's reward function

    def views(self) -> list[Sample]:
        """Its samples as hooks see them."""
        return [
            view_sample(
                sample,
                prompt=self.draw.prompt,
                group_index=self.group.group_index,
                group_size=len(self.group.samples),
                reward_details=details,
            )
            for sample, details in zip(self.group.samples, self.details, strict=True)
        ]


@dataclass(frozen=True)
class Made:
    """All groups of one rollout or evaluation, in the order of the draws."""

    groups: list[MadeGroup]
    seconds: float
    reward_s: float

    @property
    def protos(self) -> list[sample_pb2.Group]:
        return [made.group for made in self.groups]

    @property
    def incidents(self) -> Incidents:
        return sum((made.incidents for made in self.groups), Incidents())


@dataclass
class _RewardClock:
    """Seconds in which at least one reward was being computed."""

    seconds: float = 0.0
    num_active: int = 0
    since: float = 0.0

    def __enter__(self) -> None:
        if self.num_active == 0:
            self.since = time.monotonic()
        self.num_active += 1

    def __exit__(self, *error: object) -> None:
        self.num_active -= 1
        if self.num_active == 0:
            self.seconds += time.monotonic() - self.since


@dataclass
class GroupMaker:
    """Makes groups with one generator and one reward function."""

    generator: Generator
    rewards: RewardFunction
    max_in_flight: int
    """Samples."""

    async def make(self, draws: Sequence[Draw], plan: MakePlan) -> Made:
        """All groups. Raises RewardMisconfigured; whatever else goes wrong is in the samples."""
        started = time.monotonic()
        clock = _RewardClock()
        at_once = asyncio.Semaphore(max(1, self.max_in_flight // plan.group_size))

        async def one(draw: Draw) -> MadeGroup:
            async with at_once:
                return await self._make_one(draw, plan, clock)

        tasks = [asyncio.ensure_future(one(draw)) for draw in draws]
        try:
            groups = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after an error the others are of no use
                task.cancel()
        return Made(list(groups), time.monotonic() - started, clock.seconds)

    async def _make_one(self, draw: Draw, plan: MakePlan, clock: _RewardClock) -> MadeGroup:
        index = draw.group_index
        answer = await self.generator.generate(
            Ask(
                name=f"{plan.scope.name}-{plan.rollout_id}-g{index}",
                prompt_token_ids=draw.prompt.token_ids,
                num_samples=plan.group_size,
                sampling_params=plan.sampling_params,
                policy_version=plan.policy_version,
                seed=lambda sample_index, retry: plan.seed(index, sample_index, retry),
            )
        )
        group = sample_pb2.Group(
            group_index=index, prompt_index=draw.prompt.index, epoch=draw.epoch, label=draw.prompt.label_text
        )
        with clock:
            details = await asyncio.gather(*(self._reward(sample, draw, plan) for sample in answer.samples))
        group.samples.extend(answer.samples)
        return MadeGroup(group, draw, answer.incidents, tuple(details))

    async def _reward(self, sample: sample_pb2.Sample, draw: Draw, plan: MakePlan) -> Mapping[str, Any] | None:
        if sample.status not in _REWARDED:
            return None
        view = view_sample(sample, prompt=draw.prompt, group_index=draw.group_index, group_size=plan.group_size)
        reward = await self.rewards.score(view)
        if reward.value is None:
            fail(sample, reward.error)
        else:
            sample.reward = reward.value
        return reward.details


def failure_counts(groups: Sequence[sample_pb2.Group]) -> Counter[str]:
    """Reasons of the samples that came to nothing, with their numbers."""
    return Counter(sample.error for group in groups for sample in group.samples if is_lost(sample))


def is_lost(sample: sample_pb2.Sample) -> bool:
    """Whether a sample came to nothing."""
    return sample.status in (sample_pb2.SAMPLE_STATUS_FAILED, sample_pb2.SAMPLE_STATUS_ABORTED)
