"""One sample on its way through the engine, and the request that it belongs to.

It owns the state that the model thread writes and the HTTP side reads. Lists only grow, and nothing changes after
`finish_reason` is set, so the HTTP side may read a finished sample, or a prefix of a running one, without a lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.rollout.engine.sampling_params import SamplingParams

FinishReason = dict[str, Any]  # a JSON object of SGLang's
TopEntries = list[tuple[float, int]]


@dataclass(frozen=True)
class LogprobOptions:
    """Which log-probs a sample returns."""

    enabled: bool = False
    start: int = -1
    """First prompt position whose log-prob is returned; -1: none."""
    top_count: int = 0
    token_ids: tuple[int, ...] = ()
    with_text: bool = False


@dataclass(frozen=True)
class PromptLogprobs:
    """Raw log-probs of prompt tokens from the start position on; entry 0 has none."""

    values: list[float | None]
    top: list[TopEntries | None]
    by_id: list[TopEntries | None]


@dataclass(eq=False)
class Sample:
    """A prompt and its continuation. Times are wall-clock seconds."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    logprob: LogprobOptions
    stop_ids: frozenset[int]
    """Tokens that end it, unless ignore_eos, and that it must not have before min_new_tokens, ignore_eos or not."""
    key: int
    prompt_key: tuple[int, int]
    """(request number, index of the first sample of it with this prompt): equal keys share one prefill."""
    cached_tokens: int = 0
    stream: bool = False
    on_event: Callable[[Sample, int], None] | None = None
    """Called on the HTTP side with the number of tokens so far: the end, and for streams each step."""

    slot: int = -1
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[TopEntries] = field(default_factory=list)
    output_by_id: list[TopEntries] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    replay: int = 0
    """While > 0: that many known tokens are still to be fed again after a retraction."""
    num_retractions: int = 0
    computed_version: int = -1
    """Number of the weights that the stored keys and values come from."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    finish_error: str | None = None
    """Set when the sample never ran: the client gets a 503 with this text."""

    created: float = field(default_factory=time.time)
    first_scheduled: float = 0.0
    prefilled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    dispatched: float = 0.0

    def close_span(self, version: str) -> None:
        """Say that the tokens since the last span were made by `version`."""
        start = self.spans[-1][2] if self.spans else 0
        end = len(self.output_ids)
        if end > start or not self.spans:
            self.spans.append((version, start, end))

    @property
    def reserved_tokens(self) -> int:
        """Positions that the sample may come to use."""
        return len(self.prompt) + self.params.max_new_tokens


def aborted(message: str = "Aborted", status: int | None = None) -> FinishReason:
    """The finish reason of a sample that was stopped from outside."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}
