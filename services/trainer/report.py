"""What an iteration tells the world: metrics records and the row. Turns numbers into them; measures nothing itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from furlong import records
from furlong.telemetry import Telemetry
from furlong.v1 import rollout_pb2
from services.trainer.backend import StepResult, TrainResult
from services.trainer.publisher import Published
from services.trainer.row import IterationRow

log = structlog.get_logger()

PART = "trainer"
ROLLOUT_PARTS = ("rollout", "trainer")


@dataclass(frozen=True)
class Iteration:
    """One finished iteration."""

    rollout_id: int
    summary: rollout_pb2.BatchSummary
    trained: TrainResult
    published: Published
    seconds: Mapping[str, float]
    """By phase; a phase that did not run is missing."""
    step_time_s: float
    """Wall time of the whole iteration."""
    num_devices: int
    peak_flops: float | None


def send_train_steps(
    telemetry: Telemetry, steps: Sequence[StepResult], *, finished_before: int, rollout_id: int
) -> None:
    """One record an optimiser step on the axis train/step, which counts finished steps: the run's first is at 1."""
    for step, result in enumerate(steps, start=finished_before + 1):
        telemetry.metrics("train/step", step, result.values, part=PART, parts=[PART], rollout_id=rollout_id)
        if result.skipped:
            log.warning("optimizer_step_skipped", train_step=step, reason="loss or gradient is not finite")
        if result.num_tokens == 0:
            log.warning("no_trained_tokens", train_step=step, num_tokens=0, consequence="the weights stay as they are")


def send_iteration(telemetry: Telemetry, iteration: Iteration) -> None:
    """The trainer's part of the row on the axis rollout/step."""
    values = {**iteration.trained.rollout_values, **perf_values(iteration)}
    rollout_id = iteration.rollout_id
    telemetry.metrics("rollout/step", rollout_id, values, part=PART, parts=ROLLOUT_PARTS, rollout_id=rollout_id)


def perf_values(iteration: Iteration) -> dict[str, records.Value]:
    """The trainer's perf/ values. A value that would be a guess is left out."""
    trained, published, seconds = iteration.trained, iteration.published, iteration.seconds
    total, train = iteration.step_time_s, trained.train_time_s
    wait = seconds.get("waiting_for_samples", 0.0)
    evaluating, saving = seconds.get("evaluating"), seconds.get("saving")
    stepping = train - (trained.log_probs_time_s or 0.0) - (trained.ref_log_probs_time_s or 0.0)
    # what is shown by a name of its own, not the stages: those hold more, and the rest must make the parts add up
    named = wait + train + published.seconds + (evaluating or 0.0) + (saving or 0.0)
    numbers: dict[str, float | None] = {
        "train_time": train,
        "p2p_time": published.seconds,
        "eval_time": evaluating,
        "save_time": saving,
        "step_time": total,
        "other_time": max(0.0, total - named),
        "train_wait_time": wait,
        "wait_time_ratio": _ratio(wait, total),
        "rollout_train_ratio": _ratio(iteration.summary.rollout_time_s, train),
        "actor_train_tok_per_s": _ratio(trained.num_model_tokens, stepping),
        "log_probs_time": trained.log_probs_time_s,
        "ref_log_probs_time": trained.ref_log_probs_time_s,
        "update_weights_bytes": published.size_bytes,
        "update_weights_gb_per_s": _ratio(published.size_bytes / 1e9, published.seconds),
    }
    flops_per_s = _ratio(trained.model_flops, stepping * iteration.num_devices)
    if flops_per_s is not None:
        numbers["actor_train_tflops"] = flops_per_s / 1e12
        if iteration.peak_flops is not None:
            numbers["actor_train_mfu"] = flops_per_s / iteration.peak_flops
    return {f"perf/{name}": records.Last(value) for name, value in numbers.items() if value is not None}


def make_row(iteration: Iteration, *, num_rollout: int, use_kl_loss: bool) -> IterationRow:
    """The row's values: loss and kl over all optimiser steps, the largest gradient norm, the last rate; raw
    reward. A rollout that trained nothing has none of them."""
    trained, summary, published = iteration.trained, iteration.summary, iteration.published
    rates = [step.values["train/lr-pg_0"] for step in trained.steps if "train/lr-pg_0" in step.values]
    # samples that are given again were not made while this iteration waited for them
    rollout_s = None if summary.repeated_answer else summary.rollout_time_s
    waited_s = min(rollout_s or 0.0, iteration.seconds.get("waiting_for_samples", 0.0))
    named = waited_s + trained.train_time_s + published.seconds
    return IterationRow(
        rollout_id=iteration.rollout_id,
        num_rollout=num_rollout,
        loss=_over_steps(trained, "train/loss"),
        reward=summary.reward_sum / summary.reward_count if summary.reward_count else None,
        kl=_over_steps(trained, "train/kl_loss"),
        show_kl=use_kl_loss,
        rollout_s=rollout_s,
        train_s=trained.train_time_s,
        p2p_s=published.seconds,
        total_s=iteration.step_time_s,
        grad_norm=_largest(trained, "train/grad_norm"),
        lr=records.reduce_value(rates[-1]) if rates else None,
        other_s=max(0.0, iteration.step_time_s - named),
        num_tokens=sum(step.num_tokens for step in trained.steps),
    )


def _over_steps(trained: TrainResult, name: str) -> float | None:
    total: records.Value = records.Mean(0.0, 0)
    for step in trained.steps:
        if name in step.values:
            total = records.combine(total, step.values[name])
    return records.reduce_value(total)


def _largest(trained: TrainResult, name: str) -> float | None:
    total: records.Value | None = None
    for step in trained.steps:
        value = records.reduce_value(step.values[name]) if name in step.values else None
        if value is not None:
            largest = records.Max(value)
            total = largest if total is None else records.combine(total, largest)
    return None if total is None else records.reduce_value(total)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None
