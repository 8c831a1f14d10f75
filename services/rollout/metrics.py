"""Every value that rollout reports, computed from the groups of one rollout or evaluation. Pure.

Values travel as the parts of a reduction; a mean of nothing is left out, never 0. An empty list of groups gives the
counts and no crash. The meanings stand in the table of metrics in the documentation.
"""

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from furlong.records import Last, Mean, Value, histogram_of, mean_of, reduce_value
from furlong.v1 import sample_pb2
from services.rollout.user_values import as_text

LONG_RESPONSE_CHARS = 10_000
REPETITIVE_RATIO = 10
GRPO_EPSILON = 1e-6
MAX_CATEGORIES = 50

Groups = Sequence[sample_pb2.Group]


@dataclass(frozen=True)
class RolloutTimes:
    """What one rollout took, in seconds."""

    rollout_s: float
    """From the first request to the last reward."""
    reward_s: float
    """In which at least one reward was being computed."""
    wait_s: float
    """In which rollout had nothing to do before it: no weights yet, or back-pressure."""
    num_devices: int
    """GPUs, or engine processes on the CPU."""


@dataclass(frozen=True)
class Incidents:
    """Answers that came and were asked for again, and so are not in the groups."""

    num_aborted: int = 0
    num_empty: int = 0

    def __add__(self, other: "Incidents") -> "Incidents":
        return Incidents(self.num_aborted + other.num_aborted, self.num_empty + other.num_empty)


def rollout_values(
    groups: Groups,
    *,
    incidents: Incidents,
    times: RolloutTimes,
    group_size: int,
    std_normalization: bool,
    passrate: bool,
) -> dict[str, Value]:
    """All rollout/, perf/ and passrate/ values of one rollout."""
    values = {
        **_counts(groups, incidents),
        **_rewards(groups, std_normalization=std_normalization),
        **zero_std_values(groups),
        **_versions(groups),
        **_caches(groups),
        **_perf(groups, times),
        **_histograms(groups),
    }
    samples = _samples(groups)
    values.update(_spread("rollout/response_len", _response_lengths(samples), std=False))
    values["rollout/truncated_ratio"] = truncated_ratio(samples)
    values["rollout/repetition_frac"] = repetition_frac(samples)
    if passrate:
        values.update(pass_at_k_values(groups, prefix="passrate/", group_size=group_size))
    return {name: value for name, value in values.items() if not (isinstance(value, Mean) and value.count == 0)}


def eval_values(name: str, groups: Groups, *, group_size: int) -> dict[str, Value]:
    """All eval/ values of one evaluation set."""
    samples = _samples(groups)
    values: dict[str, Value] = {
        f"eval/{name}": mean_of(_reward_list(samples)),
        f"eval/{name}-truncated_ratio": truncated_ratio(samples),
        f"eval/{name}-none_reward_ratio": mean_of([int(not s.HasField("reward")) for s in samples]),
        **_spread(f"eval/{name}/response_len", _response_lengths(samples), std=False),
        **pass_at_k_values(groups, prefix=f"eval/{name}-", group_size=group_size),
    }
    return {key: value for key, value in values.items() if not (isinstance(value, Mean) and value.count == 0)}


def category_values(details: Sequence[Mapping[str, object] | None], *, key: str) -> dict[str, Value]:
    """Share of each category that the reward function gave under a key; a sample without one is `missing`.

    Only the most frequent are told, so that a key with a value of its own for each sample floods nothing.
    """
    told = [None if one is None else one.get(key) for one in details]
    counts = Counter("missing" if category is None else as_text(category, max_chars=100) for category in told)
    shown = counts.most_common(MAX_CATEGORIES)
    return {f"rollout/error_cat/{category}": Mean(count, len(told)) for category, count in shown}


def pass_at_k_values(groups: Groups, *, prefix: str, group_size: int) -> dict[str, Value]:
    """pass@k for k = 1, 2, 4 .. over the groups that are complete: every one of their rollouts has a reward."""
    rewards = [_rollout_rewards(group) for group in groups]
    complete = [one for one in rewards if len(one) == group_size and None not in one]
    correct = [sum(reward == 1 for reward in one) for one in complete]
    ks = [2**i for i in range(group_size.bit_length()) if 2**i <= group_size]
    if not complete:
        return {}
    return {f"{prefix}pass@{k}": mean_of([pass_at_k(group_size, c, k) for c in correct]) for k in ks}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, of which c are right, hold a right one: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def zero_std_values(groups: Groups) -> dict[str, Value]:
    """Groups whose rewards are all equal, by reward rounded to one decimal; shares of groups all 0 and all 1."""
    rewards = [_reward_list(group.samples) for group in groups]
    rewards = [group for group in rewards if group]
    equal = [group[0] for group in rewards if all(reward == group[0] for reward in group)]
    counts = Counter(str(round(reward, 1) + 0.0) for reward in equal)  # + 0.0: -0.0 and 0.0 are one reward
    values: dict[str, Value] = {f"rollout/zero_std/count_{reward}": Last(n) for reward, n in sorted(counts.items())}
    values["rollout/zero_std/all_zero_percentage"] = Mean(sum(r == 0 for r in equal), len(rewards))
    values["rollout/zero_std/all_one_percentage"] = Mean(sum(r == 1 for r in equal), len(rewards))
    return values


def truncated_ratio(samples: Iterable[sample_pb2.Sample]) -> Mean:
    """Share of the answered samples that the engine stopped at the token limit, whatever their reward came to."""
    truncated = sample_pb2.SAMPLE_STATUS_TRUNCATED
    answered = [s.status == truncated or s.failed_after_truncation for s in samples if s.response_token_ids]
    return Mean(sum(answered), len(answered))


def repetition_frac(samples: Iterable[sample_pb2.Sample]) -> Mean:
    """Share of the responses over 10,000 characters whose last 10,000 compress more than tenfold."""
    long = [s.response for s in samples if len(s.response) > LONG_RESPONSE_CHARS]
    return Mean(sum(is_repetitive(response) for response in long), len(long))


def is_repetitive(response: str) -> bool:
    """Whether the response's last 10,000 characters compress more than tenfold."""
    tail = response[-LONG_RESPONSE_CHARS:].encode()
    return len(tail) > REPETITIVE_RATIO * len(zlib.compress(tail, 9))


def normalized_rewards(rewards: Sequence[float], *, std_normalization: bool) -> list[float]:
    """GRPO's advantages of one group: (r - mean) / (std + 1e-6), unbiased std; 0 for equal rewards."""
    if not rewards or all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    scale = statistics.stdev(rewards) + GRPO_EPSILON if std_normalization else 1.0
    return [(reward - mean) / scale for reward in rewards]


def _counts(groups: Groups, incidents: Incidents) -> dict[str, Value]:
    statuses = Counter(sample.status for sample in _samples(groups))
    return {
        "rollout/num_samples": Last(statuses.total()),
        "rollout/num_aborted": Last(statuses[sample_pb2.SAMPLE_STATUS_ABORTED] + incidents.num_aborted),
        "rollout/num_failed": Last(statuses[sample_pb2.SAMPLE_STATUS_FAILED]),
        "rollout/num_empty": Last(incidents.num_empty),
    }


def _rewards(groups: Groups, *, std_normalization: bool) -> dict[str, Value]:
    rewards = [_reward_list(group.samples) for group in groups]
    flat = [reward for group in rewards for reward in group]
    normalized = [r for group in rewards for r in normalized_rewards(group, std_normalization=std_normalization)]
    return {
        "rollout/raw_reward": mean_of(flat),
        "rollout/rewards": mean_of(normalized),
        **_spread("rollout/reward", flat, std=True),
    }


def _versions(groups: Groups) -> dict[str, Value]:
    spans = [sample.policy_versions for sample in _samples(groups) if sample.policy_versions]
    versions = [{span.policy_version for span in one} for one in spans]
    return {
        **_spread("rollout/weight_version", [min(one) for one in versions], std=False),
        "rollout/mixed_version_ratio": Mean(sum(len(one) > 1 for one in versions), len(versions)),
    }


def _caches(groups: Groups) -> dict[str, Value]:
    told = [sample for sample in _samples(groups) if sample.HasField("num_cached_tokens")]
    cached = sum(sample.num_cached_tokens for sample in told)
    return {
        "rollout/prefix_cache_hit_rate": Mean(cached, sum(len(sample.prompt_token_ids) for sample in told)),
        "rollout/avg_cached_tokens_per_sample": Mean(cached, len(told)),
    }


def _perf(groups: Groups, times: RolloutTimes) -> dict[str, Value]:
    samples = _samples(groups)
    lengths = [len(sample.response_token_ids) for sample in samples]
    trained = sum(_response_lengths([sample for sample in samples if sample.HasField("reward")]))
    values: dict[str, Value] = {
        "perf/rollout_time": Last(times.rollout_s),
        "perf/reward_time": Last(times.reward_s),
        "perf/rollout_wait_time": Last(times.wait_s),
    }
    if times.rollout_s > 0:
        values["perf/tokens_per_gpu_per_sec"] = Last(sum(lengths) / times.rollout_s / times.num_devices)
        values["perf/effective_tokens_per_gpu_per_sec"] = Last(trained / times.rollout_s / times.num_devices)
        values["perf/longest_sample_tokens_per_sec"] = Last(max(lengths, default=0) / times.rollout_s)
    return values


def _histograms(groups: Groups) -> dict[str, Value]:
    samples = _samples(groups)
    made = {
        "rollout/reward_histogram": histogram_of(_reward_list(samples)),
        "rollout/response_len_histogram": histogram_of(_response_lengths(samples)),
    }
    return {name: histogram for name, histogram in made.items() if histogram is not None}


def _spread(name: str, numbers: Sequence[float], *, std: bool) -> dict[str, Value]:
    """Mean, median, max and min (and population std) of numbers; nothing for none."""
    if not numbers:
        return {}
    values: dict[str, Value] = {
        f"{name}/mean": mean_of(numbers),
        f"{name}/median": Last(statistics.median(numbers)),
        f"{name}/max": Last(max(numbers)),
        f"{name}/min": Last(min(numbers)),
    }
    if std:
        values[f"{name}/std"] = Last(statistics.pstdev(numbers))
    return values


def _samples(groups: Groups) -> list[sample_pb2.Sample]:
    return [sample for group in groups for sample in group.samples]


def _reward_list(samples: Iterable[sample_pb2.Sample]) -> list[float]:
    return [sample.reward for sample in samples if sample.HasField("reward")]


def _rollout_rewards(group: sample_pb2.Group) -> list[float | None]:
    """The reward of each rollout of a group; one that became several rows for training counts once."""
    rewards = {sample.index: sample.reward if sample.HasField("reward") else None for sample in group.samples}
    return list(rewards.values())


def _response_lengths(samples: Iterable[sample_pb2.Sample]) -> list[int]:
    """Trained tokens of each answered sample."""
    return [
        sum(sample.loss_mask) if sample.loss_mask else len(sample.response_token_ids)
        for sample in samples
        if sample.response_token_ids
    ]


def reduced(values: Mapping[str, Value]) -> dict[str, float]:
    """The numbers that the values come to, for hooks."""
    numbers = {name: reduce_value(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}
