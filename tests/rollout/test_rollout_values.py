"""The metrics of a rollout against values worked out by hand."""

import itertools
import random
import string

import pytest

from furlong.records import Last, Mean, reduce_value
from furlong.v1 import sample_pb2
from services.rollout.generation import fail
from services.rollout.metrics import (
    Incidents,
    RolloutTimes,
    category_values,
    eval_values,
    is_repetitive,
    normalized_rewards,
    pass_at_k,
    reduced,
    rollout_values,
    zero_std_values,
)

TIMES = RolloutTimes(rollout_s=2.0, reward_s=0.5, wait_s=0.25, num_devices=2)
COMPLETED, TRUNCATED = sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED
FAILED, ABORTED = sample_pb2.SAMPLE_STATUS_FAILED, sample_pb2.SAMPLE_STATUS_ABORTED


def sample(
    reward: float | None, length: int = 1, *, status: int = COMPLETED, version: int = 0, **fields: object
) -> sample_pb2.Sample:
    spans = [sample_pb2.VersionSpan(policy_version=version, start=0, end=length)] if length else []
    return sample_pb2.Sample(
        prompt_token_ids=[1, 2],
        response_token_ids=[3] * length,
        reward=reward,
        status=status,  # type: ignore[arg-type]
        policy_versions=spans,
        **fields,  # type: ignore[arg-type]
    )


def group(*rewards: float | None) -> sample_pb2.Group:
    return sample_pb2.Group(samples=[sample(reward, index=index) for index, reward in enumerate(rewards)])


def values(groups: list[sample_pb2.Group], *, size: int = 2, incidents: Incidents | None = None) -> dict[str, float]:
    return reduced(
        rollout_values(
            groups,
            incidents=incidents or Incidents(),
            times=TIMES,
            group_size=size,
            std_normalization=True,
            passrate=True,
        )
    )


def test_no_samples_give_counts_and_no_crash() -> None:
    told = values([])
    assert {name for name in told if name.startswith("rollout/")} == {
        "rollout/num_samples",
        "rollout/num_aborted",
        "rollout/num_failed",
        "rollout/num_empty",
    }
    assert all(told[name] == 0 for name in told if name.startswith("rollout/num"))
    assert eval_values("set", [], group_size=2) == {}


def test_rewards_before_and_after_normalisation_have_different_names() -> None:
    told = values([group(1, 1, 0, 0)], size=4)
    assert told["rollout/raw_reward"] == 0.5
    assert told["rollout/rewards"] == pytest.approx(0)
    assert (told["rollout/reward/mean"], told["rollout/reward/median"]) == (0.5, 0.5)
    assert (told["rollout/reward/max"], told["rollout/reward/min"], told["rollout/reward/std"]) == (1, 0, 0.5)


def test_normalisation_is_grpos() -> None:
    assert normalized_rewards([1.0, 0.0], std_normalization=False) == [0.5, -0.5]
    high, low = normalized_rewards([1.0, 0.0], std_normalization=True)
    assert high == -low == pytest.approx(0.5 / (0.5**0.5 + 1e-6))
    assert normalized_rewards([0.3, 0.3, 0.3], std_normalization=True) == [0, 0, 0]


def test_lengths_truncation_and_versions() -> None:
    samples = [
        sample(1, 4, version=3),
        sample(0, 2, status=TRUNCATED, version=2, loss_mask=b"\x01\x00"),
        sample(None, 0, status=FAILED),
    ]
    samples[0].policy_versions.insert(0, sample_pb2.VersionSpan(policy_version=1, start=0, end=1))
    told = values([sample_pb2.Group(samples=samples)])
    assert told["rollout/response_len/mean"] == 2.5
    assert (told["rollout/response_len/max"], told["rollout/response_len/min"]) == (4, 1)
    assert told["rollout/truncated_ratio"] == 0.5
    assert told["rollout/mixed_version_ratio"] == 0.5
    assert (told["rollout/weight_version/min"], told["rollout/weight_version/max"]) == (1, 2)
    assert told["rollout/num_failed"] == 1


def test_truncated_sample_whose_reward_fails_stays_truncated() -> None:
    samples = [sample(1, 2), sample(0, 2, status=TRUNCATED), sample(None, 2, status=TRUNCATED)]
    fail(samples[2], "the reward function raised")
    assert samples[2].status == FAILED
    told = values([sample_pb2.Group(samples=samples)], size=3)
    assert told["rollout/truncated_ratio"] == pytest.approx(2 / 3)


def test_counts_hold_what_was_asked_for_again() -> None:
    groups = [sample_pb2.Group(samples=[sample(1), sample(None, 0, status=ABORTED)])]
    told = values(groups, incidents=Incidents(num_aborted=3, num_empty=5))
    assert (told["rollout/num_samples"], told["rollout/num_aborted"], told["rollout/num_empty"]) == (2, 4, 5)


def test_zero_std_takes_integers_and_floats_alike() -> None:
    groups = [group(1, 1), group(1.0, 1.0), group(0, 0), group(-0.0, 0.0), group(0.25, 0.25), group(0, 1), group(None)]
    told = reduced(zero_std_values(groups))
    assert told["rollout/zero_std/count_1.0"] == 2
    assert told["rollout/zero_std/count_0.0"] == 2
    assert told["rollout/zero_std/count_0.2"] == 1
    assert told["rollout/zero_std/all_one_percentage"] == pytest.approx(2 / 6)
    assert told["rollout/zero_std/all_zero_percentage"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_pass_rates_count_complete_groups_and_rewards_of_exactly_one() -> None:
    told = values([group(1, 0, 0.99, 0), group(0, 0, 0, 0), group(1, 1, 1, None), group(1, 1)], size=4)
    assert told["passrate/pass@1"] == pytest.approx((0.25 + 0) / 2)
    assert told["passrate/pass@2"] == pytest.approx((0.5 + 0) / 2)
    assert told["passrate/pass@4"] == pytest.approx((1 + 0) / 2)
    assert "passrate/pass@8" not in told
    assert "passrate/pass@3" not in told


def test_rollout_that_became_several_rows_counts_once_in_pass_rates() -> None:
    rows = [sample(reward, index=index) for index, reward in enumerate([1, 0, 0, 0]) for _ in range(2)]
    told = values([sample_pb2.Group(samples=rows)], size=4)
    assert (told["passrate/pass@1"], told["passrate/pass@2"], told["passrate/pass@4"]) == (0.25, 0.5, 1.0)


def test_mean_is_of_the_rewards_that_are_there_and_says_how_many() -> None:
    found = rollout_values(
        [group(1, None), group(None, 0.5), group(None)],
        incidents=Incidents(),
        times=TIMES,
        group_size=2,
        std_normalization=True,
        passrate=True,
    )
    assert found["rollout/raw_reward"] == Mean(1.5, 2) and found["rollout/num_samples"] == Last(5)
    assert "passrate/pass@1" not in found


def test_categories_are_shares_and_a_sample_without_one_counts_as_missing() -> None:
    details: list[dict[str, object] | None] = [{"cat": "format"}, {"cat": "format"}, {"cat": None}, {"acc": 1}, None]
    told = reduced(category_values(details, key="cat"))
    assert told == {"rollout/error_cat/format": 0.4, "rollout/error_cat/missing": 0.6}
    assert len(category_values([{"cat": i} for i in range(1000)], key="cat")) == 50
    assert category_values([], key="cat") == {}


def test_repetition_is_a_share_of_long_responses() -> None:
    noise = "".join(random.Random(1).choices(string.printable, k=12_000))
    responses = ["ab" * 6000, noise, "ab" * 100]
    told = values([sample_pb2.Group(samples=[sample(1, response=text) for text in responses])])
    assert told["rollout/repetition_frac"] == 0.5
    assert is_repetitive(noise + "a" * 10_000)
    assert not is_repetitive("a" * 10_000 + noise)
    assert "rollout/repetition_frac" not in values([group(1, 0)])


def test_cache_hits_count_only_samples_that_tell() -> None:
    samples = [sample(1, num_cached_tokens=1), sample(1, num_cached_tokens=0), sample(1)]
    told = values([sample_pb2.Group(samples=samples)])
    assert told["rollout/prefix_cache_hit_rate"] == 0.25
    assert told["rollout/avg_cached_tokens_per_sample"] == 0.5


def test_speeds_are_of_all_tokens_and_devices() -> None:
    samples = [sample(1, 6), sample(1, 2, loss_mask=b"\x01\x00"), sample(None, 4, status=FAILED)]
    told = values([sample_pb2.Group(samples=samples)])
    assert told["perf/tokens_per_gpu_per_sec"] == 12 / 2.0 / 2
    assert told["perf/effective_tokens_per_gpu_per_sec"] == 7 / 2.0 / 2  # trained ones, of the same seconds
    assert told["perf/longest_sample_tokens_per_sec"] == 3
    assert (told["perf/rollout_time"], told["perf/reward_time"], told["perf/rollout_wait_time"]) == (2.0, 0.5, 0.25)


def test_evaluation_values_use_the_sets_own_size() -> None:
    groups = [group(1, 0), group(1, 1), group(None, 1)]
    groups[0].samples[1].status = TRUNCATED
    told = {name: reduce_value(value) for name, value in eval_values("math", groups, group_size=2).items()}
    assert told["eval/math"] == 0.8
    assert told["eval/math-none_reward_ratio"] == pytest.approx(1 / 6)
    assert told["eval/math-truncated_ratio"] == pytest.approx(1 / 6)
    assert (told["eval/math-pass@1"], told["eval/math-pass@2"]) == (0.75, 1.0)
    assert told["eval/math/response_len/mean"] == 1
