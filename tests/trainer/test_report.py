"""What an iteration tells: parts that add up, rates over the time that they are of, steps counted as finished."""

import dataclasses
import math

import pytest

from furlong import records
from furlong.v1 import rollout_pb2
from services.trainer.backend import StepResult, TrainResult
from services.trainer.publisher import Published
from services.trainer.report import Iteration, make_row, perf_values, send_train_steps
from services.trainer.row import IterationRow, format_row

SECONDS = {"waiting_for_samples": 1.0, "training": 5.0, "publishing": 3.0, "saving": 0.5, "evaluating": 0.25}


def iteration(seconds: dict[str, float] = SECONDS) -> Iteration:
    trained = TrainResult(
        steps=[],
        rollout_values={},
        train_time_s=4.0,  # of the 5 s of the stage: the batch is made in it too
        log_probs_time_s=0.5,
        ref_log_probs_time_s=1.5,
        num_model_tokens=1000,
        model_flops=4e12,
    )
    published = Published(seconds=2.0, size_bytes=4_000_000_000, num_engines=1, verification="")
    summary = rollout_pb2.BatchSummary(rollout_id=3, rollout_time_s=0.5)
    return Iteration(3, summary, trained, published, seconds, step_time_s=10.0, num_devices=2, peak_flops=4e12)


def told(one: Iteration) -> dict[str, float | None]:
    return {name.removeprefix("perf/"): records.reduce_value(value) for name, value in perf_values(one).items()}


def test_parts_and_the_rest_are_the_total() -> None:
    perf = told(iteration())
    parts = ("train_wait_time", "train_time", "p2p_time", "save_time", "eval_time", "other_time")
    assert sum(perf[name] or 0.0 for name in parts) == pytest.approx(perf["step_time"])
    assert perf["other_time"] == pytest.approx(10.0 - 1.0 - 4.0 - 2.0 - 0.5 - 0.25)


def test_a_phase_that_did_not_run_has_no_time() -> None:
    perf = told(iteration({"waiting_for_samples": 1.0}))
    assert "save_time" not in perf and "eval_time" not in perf


def test_training_rates_are_over_the_time_of_the_optimiser_steps() -> None:
    perf = told(iteration())  # 4 s of training, of which 2 s only scored
    assert perf["actor_train_tok_per_s"] == pytest.approx(1000 / 2.0)
    assert perf["actor_train_tflops"] == pytest.approx(4.0 / 2.0 / 2)
    assert perf["actor_train_mfu"] == pytest.approx(0.25)
    assert perf["update_weights_gb_per_s"] == pytest.approx(2.0)


def test_ratios_of_waiting() -> None:
    perf = told(iteration())
    assert perf["wait_time_ratio"] == pytest.approx(0.1)
    assert perf["rollout_train_ratio"] == pytest.approx(0.125)


class Sent:
    """Telemetry that remembers."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def metrics(self, axis: str, step: int, values: object, *, rollout_id: int, **rest: object) -> None:
        self.steps.append((step, rollout_id))


def test_step_axis_counts_finished_steps_whatever_their_number_a_rollout() -> None:
    sent, finished = Sent(), 0
    for rollout_id, number in enumerate((50, 3, 48)):
        steps = [StepResult({}, skipped=False, num_tokens=1)] * number
        send_train_steps(sent, steps, finished_before=finished, rollout_id=rollout_id)  # type: ignore[arg-type]
        finished += number
    assert [step for step, _ in sent.steps] == list(range(1, 102))
    assert sent.steps[49:54] == [(50, 0), (51, 1), (52, 1), (53, 1), (54, 2)]


def test_rollout_that_trained_nothing_has_a_row_without_values() -> None:
    row = make_row(iteration(), num_rollout=5, use_kl_loss=True)  # no steps, no rewards
    assert (row.loss, row.reward, row.kl, row.grad_norm, row.lr, row.num_tokens) == (None, None, None, None, None, 0)


def step(loss: records.Mean, **values: records.Value) -> StepResult:
    return StepResult({"train/loss": loss, **values}, skipped=False, num_tokens=int(loss.count))


def shown(*steps: StepResult, rewards: tuple[float, int] = (0.0, 0)) -> IterationRow:
    one = iteration()
    summary = rollout_pb2.BatchSummary(rollout_id=3, reward_sum=rewards[0], reward_count=rewards[1])
    trained = dataclasses.replace(one.trained, steps=steps)
    return make_row(dataclasses.replace(one, trained=trained, summary=summary), num_rollout=5, use_kl_loss=False)


def test_loss_of_a_row_weighs_each_step_by_what_it_trained() -> None:
    row = shown(step(records.Mean(0.2 * 100, 100)), step(records.Mean(2.0, 1)))
    assert row.loss == pytest.approx(22 / 101)  # 0.2178, not the mean of the means, 1.1


def test_loss_of_a_step_without_trained_tokens_is_missing_and_told() -> None:
    row = shown(step(records.Mean(0.0, 0)))
    assert (row.loss, row.num_tokens) == (None, 0)
    assert "loss=n/a" in format_row(row) and "WARNING: 0 trained tokens" in format_row(row)


def test_nan_of_one_step_is_the_rows() -> None:
    row = shown(step(records.Mean(1.0, 1)), step(records.Mean(math.nan, 1)), rewards=(2.0, 4))
    assert row.loss is not None and math.isnan(row.loss) and "WARNING: loss is nan" in format_row(row)
    assert row.reward == 0.5  # the raw mean of [1, 1, 0, 0]


def test_parts_of_a_row_whose_samples_were_made_before_add_up() -> None:
    one = iteration({**SECONDS, "waiting_for_samples": 0.1})
    summary = rollout_pb2.BatchSummary(rollout_id=3, rollout_time_s=18.4, repeated_answer=True)
    row = make_row(dataclasses.replace(one, summary=summary), num_rollout=5, use_kl_loss=False)
    assert row.rollout_s is None and "rollout=n/a" in format_row(row)
    assert row.train_s + row.p2p_s + (row.other_s or 0.0) == pytest.approx(row.total_s)


def test_total_is_measured_and_what_nobody_timed_is_shown() -> None:
    row = make_row(iteration(), num_rollout=5, use_kl_loss=False)  # 0.5 s of sampling in 1 s of waiting
    assert (row.total_s, row.other_s) == (10.0, pytest.approx(10.0 - 0.5 - 4.0 - 2.0))


def test_sampling_beside_training_counts_only_where_it_was_waited_for() -> None:
    row = make_row(iteration({"waiting_for_samples": 0.125}), num_rollout=5, use_kl_loss=False)
    assert (row.rollout_s, row.other_s) == (0.5, pytest.approx(10.0 - 0.125 - 4.0 - 2.0))
