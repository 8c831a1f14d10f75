"""What an iteration tells: parts that add up, rates over the time that they are of, steps counted as finished."""

import pytest

from furlong import records
from furlong.v1 import rollout_pb2
from services.trainer.backend import StepResult, TrainResult
from services.trainer.publisher import Published
from services.trainer.report import Iteration, perf_values, send_train_steps

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
