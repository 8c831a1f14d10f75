"""Which samples are trained, with which advantage, in which step; and what is refused."""

import math

import pytest

from furlong.v1 import sample_pb2
from services.trainer import layout
from services.trainer.batch import BadBatch, Batch, BatchRules, make_batch
from tests.trainer.tiny_model import VOCABULARY, make_groups, make_sample


def build(groups: list[sample_pb2.Group], *, num_steps: int = 1, version: int = 0, need: bool = False) -> Batch:
    rules = BatchRules(num_steps, VOCABULARY, normalize_by_std=False, require_rollout_log_probs=need)
    return make_batch(groups, rollout_id=version, policy_version=version, rules=rules)


def group(index: int, *samples: sample_pb2.Sample) -> sample_pb2.Group:
    return sample_pb2.Group(group_index=index, samples=samples)


def rewarded(index: int, reward: float | None, **more: object) -> sample_pb2.Sample:
    return make_sample(index, [2, 3], [4, 5], reward=reward, **more)  # type: ignore[arg-type]


def test_groups_go_by_index_and_not_by_position() -> None:
    groups = [group(7, rewarded(1, 4.0), rewarded(0, 0.0)), group(3, rewarded(0, 1.0), rewarded(1, 3.0))]
    batch = build(groups)
    assert batch.groups == (3, 3, 7, 7)
    assert batch.advantages.tolist() == [-1.0, 1.0, -2.0, 2.0]


def test_groups_that_lost_samples_stay_groups() -> None:
    """Of 16 prompts with 8 samples each 78 are left: no group takes another's samples, and none is needed whole."""
    whole = [(g, i) for g in range(16) for i in range(8)]
    left = whole[:3] + whole[53:]
    groups = [group(g, *(rewarded(i, float(i)) for h, i in left if h == g)) for g in range(16)]
    batch = build(groups)
    assert list(batch.groups) == [g for g, _ in left] and len(left) == 78
    for g in range(16):
        own = batch.advantages[[position for position, found in enumerate(batch.groups) if found == g]]
        assert own.sum() == pytest.approx(0.0, abs=1e-5)


def test_failed_samples_are_in_no_statistic() -> None:
    failed = rewarded(2, 100.0, status=sample_pb2.SAMPLE_STATUS_FAILED)
    aborted = rewarded(3, 100.0, status=sample_pb2.SAMPLE_STATUS_ABORTED)
    empty = make_sample(4, [2], [], reward=100.0)
    batch = build([group(0, rewarded(0, 0.0), rewarded(1, 2.0), failed, aborted, empty, rewarded(5, None))])
    assert batch.advantages.tolist() == [-1.0, 1.0]
    assert batch.num_excluded == 4


def test_reward_that_is_not_finite_is_no_reward() -> None:
    batch = build([group(0, rewarded(0, 0.0), rewarded(1, 2.0), rewarded(2, math.nan))])
    assert batch.advantages.tolist() == [-1.0, 1.0]


def test_truncated_samples_are_trained() -> None:
    truncated = rewarded(1, 2.0, status=sample_pb2.SAMPLE_STATUS_TRUNCATED)
    assert build([group(0, rewarded(0, 0.0), truncated)]).num_samples == 2


def test_samples_are_spread_over_the_steps_in_order() -> None:
    groups = [group(index, rewarded(0, 0.0), rewarded(1, 1.0)) for index in range(4)]
    assert build(groups, num_steps=2).steps == (0, 0, 0, 0, 1, 1, 1, 1)
    assert build(groups[:3], num_steps=2).steps == (0, 0, 0, 1, 1, 1)  # a filter left fewer: still two steps


def test_staleness_counts_from_the_oldest_span() -> None:
    sample = rewarded(0, 1.0, version=5)
    sample.policy_versions.add(policy_version=3, start=1, end=2)
    assert build([group(0, sample, rewarded(1, 0.0, version=5))], version=5).stalenesses == (2, 0)


def test_negative_staleness_is_an_error() -> None:
    with pytest.raises(BadBatch, match=r"group 0 sample 0.*negative"):
        build([group(0, rewarded(0, 1.0, version=57))], version=1)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (make_sample(3, [2], [4, 5], mask=[1]), "group 9 sample 3: loss_mask must have 2"),
        (make_sample(3, [2], [4, 5], mask=[1] * 3), "loss_mask must have 2"),
        (make_sample(3, [2], [4, 5], log_probs=[0.0]), "rollout_log_probs must have 2"),
        (make_sample(3, [2], [4, VOCABULARY]), "outside the model's vocabulary"),
        (make_sample(3, [2], [4, -1]), "token -1"),
        (make_sample(3, [], [4]), "prompt_token_ids"),
        (make_sample(3, [2], [4], status=sample_pb2.SAMPLE_STATUS_UNSPECIFIED), "status"),
    ],
)
def test_sample_that_breaks_the_contract_is_named(sample: sample_pb2.Sample, words: str) -> None:
    with pytest.raises(BadBatch, match=words):
        build([group(9, sample)])


def test_missing_engine_log_probs_are_refused_only_when_needed() -> None:
    groups = make_groups(with_log_probs=False)
    assert not build(groups).has_rollout_log_probs.any()
    with pytest.raises(BadBatch, match="use_rollout_logprobs"):
        build(groups, need=True)


def test_group_sent_twice_is_refused() -> None:
    with pytest.raises(BadBatch, match="group 1 was sent twice"):
        build([group(1, rewarded(0, 1.0)), group(1, rewarded(0, 1.0))])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("share", [True, False])
def test_every_token_is_computed_once_and_ranks_run_alike(world_size: int, share: bool) -> None:
    batch = build(make_groups(num_groups=3, per_group=3, seed=8))
    samples = list(range(batch.num_samples))
    plans = [
        layout.plan(batch, samples, rank=rank, world_size=world_size, max_tokens=24, share_prompts=share)
        for rank in range(world_size)
    ]
    assert len({len(plan) for plan in plans}) == 1
    real = [part for plan in plans for part in plan if not part.is_filler]
    seen = sorted(token for part in real for token in part.token_indices.tolist())
    assert seen == list(range(len(batch.loss_mask)))
    assert all(part.input_ids.numel() <= 24 or part.input_ids.shape[0] == 1 for part in real)


def test_nothing_to_train_is_no_micro_batch() -> None:
    batch = build(make_groups())
    assert layout.plan(batch, [], rank=0, world_size=2, max_tokens=9, share_prompts=True) == []


def test_long_responses_do_not_share_a_row() -> None:
    long = list(range(2, 22)) * 20  # 400 tokens
    samples = [make_sample(index, [2, 3], long, reward=float(index)) for index in range(3)]
    rows = layout.make_rows(build([group(0, *samples)]), [0, 1, 2], share_prompts=True)
    assert [row.samples for row in rows] == [(0,), (1,), (2,)]
