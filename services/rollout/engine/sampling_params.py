"""The sampling parameters of a request: names, defaults, rules.

It owns what SGLang calls `sampling_params` and says no in SGLang's words. It must never import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from services.rollout.engine.errors import contract_error, semantic_error

TOP_K_ALL = 1 << 30

# Names that SGLang takes, in the order in which its errors list them.
KNOWN = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex"),
    *("ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    *("no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark"),
    "choice",
)
UNSUPPORTED = ("json_schema", "regex", "ebnf", "structural_tag", "beam_width", "watermark", "choice")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a sample ends."""

    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the draw."""
        return bool(
            self.logit_bias
            or self.min_new_tokens
            or self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
        )


INTEGERS = {"max_new_tokens", "top_k", "min_new_tokens", "n", "stream_interval", "sampling_seed"}
NUMBERS = {"temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}
BOOLEANS = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}
STRINGS = {"stop", "stop_regex"}
FIELDS = {item.name for item in fields(SamplingParams)}


def parse_sampling_params(raw: object) -> SamplingParams:
    """Check a request's `sampling_params` and return them; raises RequestError (400)."""
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, Mapping):
        raise contract_error(f"invalid type: {_show(raw)}, expected a map")
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in KNOWN:
            expected = ", ".join(f"`{known}`" for known in KNOWN)
            raise contract_error(f"unknown field `{name}`, expected one of {expected}")
        if value is None:
            continue
        if name in UNSUPPORTED:
            raise semantic_error(f"{name} is not supported by the CPU engine; remove it or serve with SGLang.")
        if name in FIELDS:
            values[name] = _convert(name, value)
    params = SamplingParams(**values)
    _check(params)
    return params


def _convert(name: str, value: object) -> Any:
    if name in INTEGERS:
        if not isinstance(value, int) or isinstance(value, bool):
            raise contract_error(f"invalid type: {_show(value)}, expected i64")
        return value
    if name in NUMBERS:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise contract_error(f"invalid type: {_show(value)}, expected f64")
        return value
    if name in BOOLEANS:
        if not isinstance(value, bool):
            raise contract_error(f"invalid type: {_show(value)}, expected a boolean")
        return value
    if name in STRINGS:
        return _strings(value)
    if name == "stop_token_ids":
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise contract_error(f"invalid type: {_show(value)}, expected a sequence of i64")
        return tuple(value)
    return _logit_bias(value)


def _strings(value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or any(not isinstance(item, str) for item in items):
        raise contract_error(f"invalid type: {_show(value)}, expected a string or a sequence of strings")
    return tuple(item for item in items if item)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise contract_error(f"invalid type: {_show(value)}, expected a map")
    try:
        return tuple((int(key), float(bias)) for key, bias in value.items())
    except (TypeError, ValueError):
        raise semantic_error(f"logit_bias must map token ids to numbers, got {str(dict(value))[:200]}.") from None


def _check(params: SamplingParams) -> None:
    rules: tuple[tuple[bool, str], ...] = (
        (
            math.isfinite(params.temperature) and params.temperature >= 0,
            f"temperature must be a non-negative finite number, got {params.temperature}.",
        ),
        (0.0 < params.top_p <= 1.0, f"top_p must be in (0, 1], got {params.top_p}."),
        (0.0 <= params.min_p <= 1.0, f"min_p must be in [0, 1], got {params.min_p}."),
        (params.top_k == -1 or params.top_k >= 1, f"top_k must be -1 (disable) or at least 1, got {params.top_k}."),
        (
            -2.0 <= params.frequency_penalty <= 2.0,
            f"frequency_penalty must be in [-2, 2], got {params.frequency_penalty}.",
        ),
        (
            -2.0 <= params.presence_penalty <= 2.0,
            f"presence_penalty must be in [-2, 2], got {params.presence_penalty}.",
        ),
        (
            0.0 < params.repetition_penalty <= 2.0,
            f"repetition_penalty must be in (0, 2], got {params.repetition_penalty}.",
        ),
        (params.max_new_tokens >= 0, f"max_new_tokens must be at least 0, got {params.max_new_tokens}."),
        (
            0 <= params.min_new_tokens <= params.max_new_tokens,
            f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], got {params.min_new_tokens}.",
        ),
        (params.n >= 1, f"n must be at least 1, got {params.n}."),
        (params.stream_interval >= 1, f"stream_interval must be at least 1, got {params.stream_interval}."),
        (
            all(math.isfinite(bias) for _, bias in params.logit_bias),
            "logit_bias must hold finite numbers.",
        ),
    )
    for holds, message in rules:
        if not holds:
            raise semantic_error(message)
    for pattern in params.stop_regex:
        try:
            re.compile(pattern)
        except re.error as error:
            raise semantic_error(f"stop_regex must be a regular expression, got {pattern!r}: {error}.") from None


def _show(value: object) -> str:
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f'string "{value[:200]}"'
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value}`"
    return "sequence" if isinstance(value, list) else "map"
