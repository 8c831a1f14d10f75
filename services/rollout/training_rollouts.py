"""Makes the rollout that is trained on: groups, summary, values; or says clearly why there is none."""

import asyncio
import time
from dataclasses import dataclass, field

import grpc
import structlog

from furlong.config import RunConfig
from furlong.phases import PhaseReport
from furlong.records import encode_values
from furlong.v1 import rollout_pb2, sample_pb2
from services.rollout.batches import NewBatch
from services.rollout.feed import Draw
from services.rollout.fleet import Fleet
from services.rollout.generation import sampling_params
from services.rollout.group_maker import GroupMaker, Made, MakePlan, failure_counts, is_lost
from services.rollout.metrics import RolloutTimes, category_values, rollout_values
from services.rollout.refusal import Refused
from services.rollout.reporting import Reporter
from services.rollout.rewards import RewardMisconfigured
from services.rollout.sample_table import sample_table
from services.rollout.seeds import SeedScope
from services.rollout.weight_update import WeightUpdates

log = structlog.get_logger()


@dataclass
class IdleClock:
    """Seconds since the engines last had something to do."""

    since: float = field(default_factory=time.monotonic)

    def stop(self) -> float:
        """How long it was idle; work begins."""
        return time.monotonic() - self.since

    def start(self) -> None:
        """Work has ended."""
        self.since = time.monotonic()


async def make_with_engines(
    maker: GroupMaker, draws: list[Draw], plan: MakePlan, *, fleet: Fleet, clock: IdleClock
) -> Made:
    """Make groups as long as an engine serves the version. Raises Refused when none does (any more)."""
    if not fleet.ready(plan.policy_version):
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"no engine holds policy version {plan.policy_version}: {fleet.describe_losses() or 'they hold another'}. "
            "Publish it first.",
        )
    making = asyncio.ensure_future(maker.make(draws, plan))
    lost = asyncio.ensure_future(fleet.wait_until(lambda: not fleet.ready(plan.policy_version)))
    try:
        await asyncio.wait({making, lost}, return_when=asyncio.FIRST_COMPLETED)
        if making.done():
            made = making.result()
            _tell_losses(made, plan)
            return made
        why = f"every engine of policy version {plan.policy_version} was lost meanwhile: {fleet.describe_losses()}"
        raise Refused(grpc.StatusCode.UNAVAILABLE, f"{why}. Publish the weights again, then ask again.")
    except RewardMisconfigured as error:
        raise Refused(grpc.StatusCode.INTERNAL, str(error)) from error  # asked again, it would be the same
    finally:
        making.cancel()
        lost.cancel()
        await asyncio.wait({making, lost}, timeout=5.0)
        clock.start()


@dataclass
class TrainingRollouts:
    """Makes rollouts by the run's settings."""

    config: RunConfig
    maker: GroupMaker
    fleet: Fleet
    weights: WeightUpdates
    reporter: Reporter
    clock: IdleClock

    async def make(self, rollout_id: int, policy_version: int, draws: list[Draw]) -> NewBatch:
        """One rollout. Raises Refused: no engine (any more), or all samples failed."""
        rollout, run = self.config.rollout, self.config.run
        assert run.n_samples_per_prompt is not None
        plan = MakePlan(
            rollout_id=rollout_id,
            policy_version=policy_version,
            group_size=run.n_samples_per_prompt,
            sampling_params=sampling_params(
                temperature=rollout.rollout_temperature,
                top_p=rollout.rollout_top_p,
                top_k=rollout.rollout_top_k,
                max_new_tokens=rollout.rollout_max_response_len,
                stop=rollout.rollout_stop,
                stop_token_ids=rollout.rollout_stop_token_ids,
            ),
            scope=SeedScope(run.seed),
        )
        wait_s = self.clock.stop()
        weights_digest = self.weights.weights_digest
        with PhaseReport(self.reporter.telemetry).during("generating", rollout_id=rollout_id):
            made = await make_with_engines(self.maker, draws, plan, fleet=self.fleet, clock=self.clock)
        _refuse_if_all_failed(made, rollout_id)
        values = rollout_values(
            made.protos,
            incidents=made.incidents,
            times=RolloutTimes(made.seconds, made.reward_s, wait_s, self.fleet.num_devices),
            group_size=plan.group_size,
            std_normalization=not self.config.trainer.disable_grpo_std_normalization,
            passrate=rollout.log_passrate,
        )
        if rollout.log_reward_category:
            told = [one for group in made.groups for one in group.details]
            values.update(category_values(told, key=rollout.log_reward_category))
        if rollout.log_samples:
            views = (view for group in made.groups for view in group.views())
            values["rollout/samples"] = sample_table(views, num_rows=rollout.log_samples)
        details = [group.details for group in made.groups]
        return NewBatch(made.protos, summarize(made, rollout_id), weights_digest, encode_values(values), details)


def summarize(made: Made, rollout_id: int) -> rollout_pb2.BatchSummary:
    """What the trainer needs of a rollout besides its samples."""
    samples = [sample for group in made.protos for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.HasField("reward")]
    return rollout_pb2.BatchSummary(
        rollout_id=rollout_id,
        num_groups=len(made.groups),
        num_samples=len(samples),
        reward_sum=sum(rewards),
        reward_count=len(rewards),
        rollout_time_s=made.seconds,
        num_response_tokens=sum(len(sample.response_token_ids) for sample in samples),
    )


def _tell_losses(made: Made, plan: MakePlan) -> None:
    """Say what samples were lost for: the row has only their number, and of incomplete groups no pass rate at all."""
    groups, reasons = made.protos, failure_counts(made.protos)
    if reasons:
        log.warning(
            "samples_lost",
            made_for=plan.scope.name,
            rollout_id=plan.rollout_id,
            num_lost=reasons.total(),
            num_samples=sum(len(group.samples) for group in groups),
            num_incomplete_groups=sum(any(map(is_lost, group.samples)) for group in groups),
            num_groups=len(groups),
            reasons=[f"{count} x {reason}" for reason, count in reasons.most_common(5)],
        )


def _refuse_if_all_failed(made: Made, rollout_id: int) -> None:
    samples: list[sample_pb2.Sample] = [sample for group in made.protos for sample in group.samples]
    if not all(is_lost(sample) for sample in samples):
        return
    reasons = "; ".join(f"{count} x {reason}" for reason, count in failure_counts(made.protos).most_common(5))
    raise Refused(
        grpc.StatusCode.INTERNAL, f"rollout {rollout_id}: all {len(samples)} samples came to nothing: {reasons}"
    )
