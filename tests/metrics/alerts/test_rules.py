"""Every built-in rule fires on its fault, soon, and on nothing else; and stays silent on healthy noise."""

import math
from dataclasses import dataclass

import pytest

from furlong.alertrules import BUILT_IN
from services.metrics.alerts.alert import Alert, State
from tests.metrics.alerts.series import SHAPES, Change, alerts_of, rows_of

FAULT_AT = 300


def sets(**values: float) -> Change:
    """The values of `axis__key` are these from the fault on."""

    def change(since: int, row: dict[str, float]) -> None:
        for name, value in values.items():
            key = name.replace("__", "/")
            if key in row:
                row[key] = value

    return change


def grows(key: str, by: float) -> Change:
    """The value is multiplied by (1 + by x rows since)."""

    def change(since: int, row: dict[str, float]) -> None:
        if key in row:
            row[key] *= 1 + by * since

    return change


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and within how many rows it must be told."""

    rule: str
    change: Change
    within: int
    tells_too: tuple[str, ...] = ()


def skips(since: int, row: dict[str, float]) -> None:
    if "train/skipped_steps" in row:
        row["train/skipped_steps"] = 1.0 + since


def entropy_falls(since: int, row: dict[str, float]) -> None:
    if "train/entropy_loss" in row:
        row["train/entropy_loss"] *= 0.6**since


def slower(since: int, row: dict[str, float]) -> None:
    if "perf/rollout_time" in row:
        row["perf/tokens_per_gpu_per_sec"] *= 0.3


FAULTS = [
    Fault("loss_nonfinite", sets(train__loss=math.nan), 1),
    Fault("loss_nonfinite", sets(train__grad_norm=math.inf), 1),
    Fault("loss_nonfinite", skips, 1),
    Fault("loss_spike", sets(train__loss=2.0), 2),
    Fault("loss_spike", sets(train__loss=-2.0), 2),
    Fault("loss_spike", sets(train__loss=500.0), 1),
    Fault("kl_jump", sets(train__kl_loss=3.0), 3),
    Fault("logprob_diff_climbing", grows("train/train_rollout_logprob_abs_diff", 0.1), 30),
    Fault("logprob_diff_climbing", sets(train__train_rollout_logprob_abs_diff=0.9), 5),
    Fault("entropy_collapse", entropy_falls, 12),
    Fault("grad_clipping", sets(train__grad_clipped=1.0), 20),
    Fault("clipfrac_high", sets(train__pg_clipfrac=0.6), 2),
    Fault("reward_collapsed", sets(rollout__raw_reward=0.1, rollout__reward__std=0.0), 8),
    Fault("zero_variance_groups", sets(rollout__zero_std__all_zero_percentage=0.6), 3),
    Fault("truncation_high", sets(rollout__truncated_ratio=0.4), 3),
    Fault("repetition", sets(rollout__repetition_frac=0.3), 3),
    Fault("staleness_high", sets(rollout__staleness__mean=6.0), 3),
    Fault("aborted_share", sets(rollout__num_aborted=200.0), 2),
    Fault("failed_share", sets(rollout__num_failed=200.0), 2),
    Fault("time_imbalance", sets(perf__rollout_time=400.0), 5),
    Fault("time_imbalance", sets(perf__train_time=400.0), 5),
    Fault("throughput_falling", slower, 5),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule)
@pytest.mark.parametrize("shape", ["heavy", pytest.param("skewed", marks=pytest.mark.slow)])
def test_rule_fires_on_its_fault_soon_and_no_other_does(fault: Fault, shape: str) -> None:
    rows = rows_of(FAULT_AT + fault.within, seed=7, shape=shape, fault_at=FAULT_AT, change=fault.change)
    found = alerts_of(rows)
    assert [alert.rule for alert in found] == [fault.rule]
    assert found[0].state is State.FIRING and FAULT_AT <= found[0].step < FAULT_AT + fault.within
    assert_has_evidence(found[0])


def assert_has_evidence(alert: Alert) -> None:
    evidence = alert.evidence or {}
    assert evidence["steps"][-1] == alert.step and len(evidence["values"]) == len(evidence["steps"]) > 1
    assert evidence["numbers"] == dict(BUILT_IN[alert.rule].numbers) or alert.rule == "loss_nonfinite"
    assert alert.summary and alert.remedy.endswith(".") and alert.severity in ("warning", "critical")


def test_every_rule_of_rows_has_a_fault_here() -> None:
    tested = {fault.rule for fault in FAULTS} | {"reward_constant"}
    assert tested == {rule.name for rule in BUILT_IN.values() if rule.is_of_rows}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_thousand_steps_of_healthy_noise_raise_nothing(shape: str) -> None:
    assert alerts_of(rows_of(1_000, seed=1, shape=shape)) == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_thirty_times_a_thousand_steps_of_healthy_noise_raise_nothing(shape: str) -> None:
    found = {seed: alerts_of(rows_of(1_000, seed=seed, shape=shape)) for seed in range(100, 130)}
    assert {seed: [alert.summary for alert in alerts] for seed, alerts in found.items() if alerts} == {}


def test_a_solved_task_is_told_as_constant_and_not_as_collapsed() -> None:
    """All rewards 1 is the best that there is; it is worth a word, since nothing is learnt any more."""
    change = sets(rollout__raw_reward=1.0, rollout__reward__std=0.0, rollout__zero_std__all_zero_percentage=0.0)
    found = alerts_of(rows_of(FAULT_AT + 20, fault_at=FAULT_AT, change=change))
    assert [(alert.rule, alert.severity) for alert in found] == [("reward_constant", "warning")]
    assert "at one value" in found[0].summary


def test_a_reward_that_never_moves_from_the_start_is_told() -> None:
    change = sets(rollout__raw_reward=0.0, rollout__reward__std=0.0, rollout__zero_std__all_zero_percentage=1.0)
    rules = {alert.rule for alert in alerts_of(rows_of(12, fault_at=0, change=change))}
    assert rules == {"reward_constant", "zero_variance_groups"}


def test_many_groups_that_are_all_right_are_no_alarm() -> None:
    change = sets(rollout__zero_std__all_one_percentage=0.9, rollout__zero_std__all_zero_percentage=0.02)
    assert alerts_of(rows_of(FAULT_AT + 20, fault_at=FAULT_AT, change=change)) == []


def test_a_row_without_a_rules_keys_leaves_it_alone() -> None:
    def drop(since: int, row: dict[str, float]) -> None:
        row.clear()

    assert alerts_of(rows_of(400, fault_at=50, change=drop)) == []


def test_a_single_outlier_of_ordinary_size_is_no_spike() -> None:
    def once(since: int, row: dict[str, float]) -> None:
        if since == 0 and "train/loss" in row:
            row["train/loss"] = 1.0

    assert alerts_of(rows_of(FAULT_AT + 50, fault_at=FAULT_AT, change=once)) == []


def test_a_spike_that_passes_is_over_and_a_level_that_stays_becomes_usual() -> None:
    def passes(since: int, row: dict[str, float]) -> None:
        if since < 5 and "train/loss" in row:
            row["train/loss"] = 5.0

    states = [alert.state for alert in alerts_of(rows_of(FAULT_AT + 40, fault_at=FAULT_AT, change=passes))]
    assert states == [State.FIRING, State.RESOLVED]
    stays = [a.state for a in alerts_of(rows_of(FAULT_AT + 300, fault_at=FAULT_AT, change=sets(train__loss=5.0)))]
    assert stays == [State.FIRING, State.RESOLVED]


def test_short_rollouts_say_nothing_of_throughput_and_balance() -> None:
    change = sets(perf__rollout_time=0.01, perf__train_time=0.5, perf__tokens_per_gpu_per_sec=1.0)
    assert alerts_of(rows_of(FAULT_AT + 50, fault_at=FAULT_AT, change=change)) == []
