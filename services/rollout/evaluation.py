"""Evaluation: every set, with the current weights, by its own sampling settings; idempotent like a rollout."""

import asyncio
import time
from dataclasses import dataclass, field

import structlog

from furlong.config import RunConfig
from furlong.records import Last, Value
from furlong.v1 import rollout_pb2
from services.rollout.feed import Draw
from services.rollout.fleet import Fleet
from services.rollout.generation import sampling_params
from services.rollout.group_maker import GroupMaker, Made, MakePlan
from services.rollout.metrics import eval_values
from services.rollout.prompts import PromptSet
from services.rollout.refusal import Refused
from services.rollout.reporting import Reporter
from services.rollout.rewards import RewardMisconfigured
from services.rollout.sample_view import Sample
from services.rollout.seeds import SeedScope
from services.rollout.training_rollouts import IdleClock, make_with_engines

log = structlog.get_logger()


@dataclass
class Evaluations:
    """Runs the evaluation sets of the run."""

    config: RunConfig
    sets: dict[str, PromptSet]
    maker: GroupMaker
    fleet: Fleet
    reporter: Reporter
    clock: IdleClock
    is_running: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last: tuple[tuple[int, int, int, str], rollout_pb2.EvaluateResponse] | None = None

    async def evaluate(
        self, rollout_id: int, policy_version: int, *, attempt: int, weights_digest: str
    ) -> rollout_pb2.EvaluateResponse:
        """Evaluate all sets; the last answer again if nothing changed since. Raises Refused."""
        async with self._lock:
            key = (rollout_id, policy_version, attempt, weights_digest)
            if self._last is not None and self._last[0] == key:
                return self._last[1]
            self.is_running = True
            try:
                answer = await self._evaluate(rollout_id, policy_version)
            except Refused as error:
                is_users = isinstance(error.__cause__, RewardMisconfigured)
                reason = "reward_misconfigured" if is_users else "engine_lost"
                self.reporter.report_skipped_evaluation(rollout_id, reason, is_final=is_users)
                raise
            finally:
                self.is_running = False
            self._last = (key, answer)
            return answer

    async def _evaluate(self, rollout_id: int, policy_version: int) -> rollout_pb2.EvaluateResponse:
        started = time.monotonic()
        made: dict[str, Made] = {}
        for name, prompts in self.sets.items():
            draws = [Draw(index, 0, prompt) for index, prompt in enumerate(prompts.prompts)]
            plan = self._plan(name, rollout_id, policy_version)
            self.clock.stop()
            made[name] = await make_with_engines(self.maker, draws, plan, fleet=self.fleet, clock=self.clock)
        seconds = time.monotonic() - started
        values: dict[str, Value] = {}
        for name, one in made.items():
            values.update(eval_values(name, one.protos, group_size=self.config.rollout.n_samples_per_eval_prompt))
            if self.sets[name].num_too_long:
                values["eval/skipped_prompt_too_long"] = Last(sum(s.num_too_long for s in self.sets.values()))
        if made:
            self.reporter.report_evaluation(rollout_id, values, samples=lambda: _views(made))
        log.info("evaluated", eval_step=rollout_id, policy_version=policy_version, sets=list(made), seconds=seconds)
        return rollout_pb2.EvaluateResponse(
            results=[_result(name, one) for name, one in made.items()], eval_time_s=seconds
        )

    def _plan(self, name: str, rollout_id: int, policy_version: int) -> MakePlan:
        rollout = self.config.rollout
        assert rollout.eval_temperature is not None
        assert rollout.eval_top_p is not None
        assert rollout.eval_max_response_len is not None
        return MakePlan(
            rollout_id=rollout_id,
            policy_version=policy_version,
            group_size=rollout.n_samples_per_eval_prompt,
            sampling_params=sampling_params(
                temperature=rollout.eval_temperature,
                top_p=rollout.eval_top_p,
                top_k=rollout.rollout_top_k,
                max_new_tokens=rollout.eval_max_response_len,
                stop=rollout.rollout_stop,
                stop_token_ids=rollout.rollout_stop_token_ids,
            ),
            scope=SeedScope(self.config.run.seed, f"eval/{name}"),
        )


def _views(made: dict[str, Made]) -> dict[str, list[Sample]]:
    return {name: [view for group in one.groups for view in group.views()] for name, one in made.items()}


def _result(name: str, made: Made) -> rollout_pb2.EvaluationResult:
    samples = [sample for group in made.protos for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.HasField("reward")]
    return rollout_pb2.EvaluationResult(
        name=name, reward_sum=sum(rewards), reward_count=len(rewards), num_samples=len(samples)
    )
