"""From the groups that rollout sends to the numbers that are trained on: checked, flat, with advantages.

Owns which samples are trained. Groups are known by group_index, samples by their index, never by position. It never
re-tokenises and never guesses: a sample that breaks the contract is an error that names it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from furlong.v1 import sample_pb2
from services.trainer.grpo import group_advantages

TRAINED_STATUSES = (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)


class BadBatch(Exception):
    """What rollout sent breaks the contract; the text names the group and the sample."""


@dataclass(frozen=True)
class Batch:
    """The trained samples of one rollout. Lists a sample share one order; response tokens lie sample by sample."""

    rollout_id: int
    policy_version: int
    prompts: tuple[np.ndarray, ...]
    """Token ids of each sample's prompt, int64."""
    responses: tuple[np.ndarray, ...]
    """Token ids of each sample's response, int64, never empty."""
    groups: tuple[int, ...]
    """group_index of each sample."""
    advantages: torch.Tensor
    """[sample], float32."""
    loss_mask: torch.Tensor
    """[response token], float32, 1 = trained."""
    rollout_log_probs: torch.Tensor
    """[response token], float32, as the engine reported them; 0 where it reported none."""
    has_rollout_log_probs: torch.Tensor
    """[response token], bool."""
    steps: tuple[int, ...]
    """Which optimiser step of the rollout trains each sample, from 0."""
    num_steps: int
    stalenesses: tuple[int, ...]
    """policy_version less the oldest version in each sample."""
    num_excluded: int
    """Samples that are not trained: failed, aborted, empty or without a reward."""

    @property
    def num_samples(self) -> int:
        return len(self.responses)

    @property
    def offsets(self) -> np.ndarray:
        """Where each sample's response begins among all response tokens, and the end. [sample + 1]."""
        return np.concatenate([[0], np.cumsum([len(response) for response in self.responses])]).astype(np.int64)

    @property
    def trained_tokens(self) -> np.ndarray:
        """Tokens of each sample whose mask is 1. [sample]"""
        if not self.responses:
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.loss_mask.numpy(), self.offsets[:-1]).astype(np.int64)


@dataclass(frozen=True)
class BatchRules:
    """What a batch is checked and cut by."""

    num_steps: int
    vocabulary_size: int
    normalize_by_std: bool
    require_rollout_log_probs: bool


def make_batch(groups: Sequence[sample_pb2.Group], *, rollout_id: int, policy_version: int, rules: BatchRules) -> Batch:
    """Check every sample, leave out what cannot be trained, compute advantages. Raises BadBatch."""
    seen: set[int] = set()
    kept: list[tuple[int, sample_pb2.Sample, float, int]] = []
    total = sum(len(group.samples) for group in groups)
    position = 0
    for group in sorted(groups, key=lambda group: group.group_index):
        if group.group_index in seen:
            raise BadBatch(f"rollout {rollout_id}: group {group.group_index} was sent twice")
        seen.add(group.group_index)
        usable: list[tuple[sample_pb2.Sample, int]] = []
        for sample in sorted(group.samples, key=lambda sample: sample.index):
            _check(sample, group.group_index, rules)
            if is_trained(sample):
                usable.append((sample, position * rules.num_steps // total))
            position += 1
        advantages = group_advantages([sample.reward for sample, _ in usable], normalize_by_std=rules.normalize_by_std)
        kept += [
            (group.group_index, sample, advantage, step)
            for (sample, step), advantage in zip(usable, advantages, strict=True)
        ]
    return _flatten(kept, rollout_id, policy_version, rules, num_excluded=total - len(kept))


def is_trained(sample: sample_pb2.Sample) -> bool:
    """Whether a sample counts in its group and is trained: it ended, has tokens and a finite reward."""
    return (
        sample.status in TRAINED_STATUSES
        and len(sample.response_token_ids) > 0
        and sample.HasField("reward")
        and math.isfinite(sample.reward)
    )


def _flatten(
    kept: Sequence[tuple[int, sample_pb2.Sample, float, int]],
    rollout_id: int,
    policy_version: int,
    rules: BatchRules,
    *,
    num_excluded: int,
) -> Batch:
    samples = [sample for _, sample, _, _ in kept]
    masks = [_mask(sample) for sample in samples]
    log_probs = [_log_probs(sample) for sample in samples]
    has = [np.full(len(s.response_token_ids), len(s.rollout_log_probs) > 0) for s in samples]
    return Batch(
        rollout_id=rollout_id,
        policy_version=policy_version,
        prompts=tuple(np.array(sample.prompt_token_ids, dtype=np.int64) for sample in samples),
        responses=tuple(np.array(sample.response_token_ids, dtype=np.int64) for sample in samples),
        groups=tuple(group for group, _, _, _ in kept),
        advantages=torch.tensor([advantage for _, _, advantage, _ in kept], dtype=torch.float32),
        loss_mask=torch.from_numpy(_joined(masks, np.float32)),
        rollout_log_probs=torch.from_numpy(_joined(log_probs, np.float32)),
        has_rollout_log_probs=torch.from_numpy(_joined(has, np.bool_)),
        steps=tuple(step for _, _, _, step in kept),
        num_steps=rules.num_steps,
        stalenesses=tuple(_staleness(sample, group, policy_version) for group, sample, _, _ in kept),
        num_excluded=num_excluded,
    )


def _joined(parts: Sequence[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0, kind)]).astype(kind)


def _mask(sample: sample_pb2.Sample) -> np.ndarray:
    if not sample.loss_mask:
        return np.ones(len(sample.response_token_ids), np.float32)
    return (np.frombuffer(sample.loss_mask, np.uint8) != 0).astype(np.float32)


def _log_probs(sample: sample_pb2.Sample) -> np.ndarray:
    if not sample.rollout_log_probs:
        return np.zeros(len(sample.response_token_ids), np.float32)
    return np.array(sample.rollout_log_probs, dtype=np.float32)


def _staleness(sample: sample_pb2.Sample, group_index: int, policy_version: int) -> int:
    oldest = min((span.policy_version for span in sample.policy_versions), default=policy_version)
    if oldest > policy_version:
        raise BadBatch(
            f"group {group_index} sample {sample.index}: written by policy version {oldest}, but the trainer is at "
            f"{policy_version}: its staleness would be negative"
        )
    return policy_version - oldest


def _check(sample: sample_pb2.Sample, group_index: int, rules: BatchRules) -> None:
    where = f"group {group_index} sample {sample.index}"
    length = len(sample.response_token_ids)
    if sample.status == sample_pb2.SAMPLE_STATUS_UNSPECIFIED:
        raise BadBatch(f"{where}: status must be given, got SAMPLE_STATUS_UNSPECIFIED")
    for name, given in (("loss_mask", len(sample.loss_mask)), ("rollout_log_probs", len(sample.rollout_log_probs))):
        if given not in (0, length):
            raise BadBatch(f"{where}: {name} must have {length} entries, one a response token, got {given}")
    if not is_trained(sample):
        return
    if not sample.prompt_token_ids:
        raise BadBatch(f"{where}: prompt_token_ids must not be empty")
    if rules.require_rollout_log_probs and not sample.rollout_log_probs:
        raise BadBatch(f"{where}: rollout_log_probs must be there with use_rollout_logprobs; the engine gave none")
    for ids in (sample.prompt_token_ids, sample.response_token_ids):
        if min(ids) < 0 or max(ids) >= rules.vocabulary_size:
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise BadBatch(f"{where}: token {worst} is outside the model's vocabulary of {rules.vocabulary_size}")
