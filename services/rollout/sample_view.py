"""Samples and flags as a user's functions see them, under the names that Miles gives them.

Copies only: what a user's function does to them changes nothing in the run.
"""

import copy
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from furlong.config import RunConfig
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
class Sample:
    """One response, as reward functions and log hooks get it."""

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
    Status = Status

    def get_reward_value(self, args: object) -> float | None:
        """The reward as a number."""
        return self.reward

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)


class Flags(Mapping[str, Any]):  # Any: every flag has its own type
    """The run's flags, read-only, as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name]
        except KeyError:
            raise AttributeError(f"there is no flag {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"flags are read-only: {name} cannot be set")

    def __getitem__(self, name: str) -> Any:
        return object.__getattribute__(self, "_values")[name]

    def __iter__(self) -> Iterator[str]:
        return iter(object.__getattribute__(self, "_values"))

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_values"))

    def __copy__(self) -> "Flags":
        return self

    def __deepcopy__(self, memo: object) -> "Flags":
        return self


def flags_of(config: RunConfig) -> Flags:
    """All flags of a run in one flat namespace."""
    values: dict[str, Any] = {}
    for name in RunConfig.model_fields:
        section = getattr(config, name)
        values.update({field_name: getattr(section, field_name) for field_name in type(section).model_fields})
    return Flags(values)


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
    )
