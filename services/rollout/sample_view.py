"""Samples as a user's functions see them, under the names that Miles gives them.

Copies only: what a user's function does to them changes nothing in the run.
"""

import copy
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from furlong.v1 import sample_pb2
from services.rollout.prompts import Prompt


class Status(enum.Enum):
    """How a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_STATUS = {
    sample_pb2.SAMPLE_STATUS_COMPLETED: Status.COMPLETED,
    sample_pb2.SAMPLE_STATUS_TRUNCATED: Status.TRUNCATED,
    sample_pb2.SAMPLE_STATUS_ABORTED: Status.ABORTED,
    sample_pb2.SAMPLE_STATUS_FAILED: Status.FAILED,
}


@dataclass
class SpecInfo:
    """Speculative decoding; all 0, since engines here do none."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted of the drafted tokens."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens a verification."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheInfo:
    """What of the prompt the engine had in its cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the prompt's tokens."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


@dataclass
class Sample:
    """One response, as reward functions and log hooks get it. What Furlong has no use for has Miles' default."""

    index: int
    """Number of the sample over the whole run."""
    group_index: int
    prompt: str
    tokens: list[int]
    """Prompt and response."""
    response: str
    response_length: int
    label: Any  # Any: as in the data
    reward: float | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)  # Any: as in the data
    loss_mask: list[int] | None = None
    """One a response token. None: all ones."""
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    """One a span of tokens, in order."""
    cached_tokens: int | None = None
    error: str = ""
    reward_details: dict[str, Any] | None = None  # Any: what the reward function gave, if it gave a dict
    sample_index: int = 0
    """Index of the sample within its group."""
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    remove_sample: bool = False
    non_generation_time: float = 0.0
    train_metadata: dict[str, Any] | None = None  # Any: Miles' own
    session_id: str | None = None
    generate_function_path: str | None = None
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    rollout_routed_experts: None = None
    Status = Status
    SpecInfo = SpecInfo
    PrefixCacheInfo = PrefixCacheInfo

    def get_reward_value(self, args: object) -> float | None:
        """The reward as a number."""
        return self.reward

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_weight_version(self) -> int | None:
        """The oldest policy version that wrote some of it. None: none is known."""
        return min(map(int, self.weight_versions), default=None)

    def to_dict(self) -> dict[str, Any]:  # Any: every field has its own type
        """The fields, with the status as its text."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        nested = {"spec_info": vars(self.spec_info).copy(), "prefix_cache_info": vars(self.prefix_cache_info).copy()}
        return {**plain, "status": self.status.value, **nested}


def view_sample(
    sample: sample_pb2.Sample,
    *,
    prompt: Prompt | None,
    group_index: int,
    group_size: int,
    reward_details: Mapping[str, Any] | None = None,
) -> Sample:
    """A sample as user functions see it; nothing in it is shared with the run."""
    return Sample(
        index=group_index * group_size + sample.index,
        group_index=group_index,
        prompt=prompt.text if prompt else "",
        tokens=[*sample.prompt_token_ids, *sample.response_token_ids],
        response=sample.response,
        response_length=len(sample.response_token_ids),
        label=copy.deepcopy(prompt.label) if prompt else None,
        reward=sample.reward if sample.HasField("reward") else None,
        status=_STATUS.get(sample.status, Status.PENDING),
        metadata=copy.deepcopy(dict(prompt.metadata)) if prompt else {},
        loss_mask=list(sample.loss_mask) if sample.loss_mask else None,
        rollout_log_probs=list(sample.rollout_log_probs) if sample.rollout_log_probs else None,
        weight_versions=[str(span.policy_version) for span in sample.policy_versions],
        cached_tokens=sample.num_cached_tokens if sample.HasField("num_cached_tokens") else None,
        error=sample.error,
        reward_details=copy.deepcopy(dict(reward_details)) if reward_details is not None else None,
        sample_index=sample.index,
        prefix_cache_info=PrefixCacheInfo(sample.num_cached_tokens, len(sample.prompt_token_ids)),
    )
