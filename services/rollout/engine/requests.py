"""From a /generate body to samples.

It owns the request's fields, their types and limits, and what SGLang says when they are wrong; where SGLang would
crash (ids outside the vocabulary, a prompt of no tokens) it refuses. It must never touch the model.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.engine.errors import field_error, semantic_error
from services.rollout.engine.noise import mix, sample_seed
from services.rollout.engine.sample import LogprobOptions, Sample
from services.rollout.engine.sampling_params import SamplingParams, parse_sampling_params
from services.rollout.engine.tokenizer import Tokenizer

Json = Mapping[str, Any]
MAX_SAMPLES = 65536


@dataclass(frozen=True)
class ModelLimits:
    """What a request must fit into."""

    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos_token_ids: frozenset[int]
    random_seed: int


@dataclass(frozen=True)
class GenerateRequest:
    """The samples of one request, in the order in which they are answered."""

    samples: list[Sample]
    is_list: bool
    stream: bool
    return_prompt_ids: bool


class RequestReader:
    """Reads /generate bodies."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._numbers = itertools.count()

    def read(self, body: Json) -> GenerateRequest:
        """Check a body; RequestError says what is wrong with it."""
        stream = _boolean(body, "stream")
        prompts, is_batch = self._prompts(body)
        params = _per_item(body.get("sampling_params"), len(prompts), is_batch=is_batch, name="sampling_params")
        parsed = _parse_params(params)
        counts = [item.n for item in parsed]
        if sum(counts) > MAX_SAMPLES:
            raise semantic_error(f"A request may ask for at most {MAX_SAMPLES} samples, got {sum(counts)}.")
        options = _logprob_options(body, len(prompts), is_batch=is_batch)
        rids = _rids(body.get("rid"), counts, is_list=is_batch or counts[0] > 1)
        for prompt, item, option in zip(prompts, parsed, options, strict=True):
            self.check(prompt, item, option)
        samples = self.make_samples(prompts, parsed, options, rids, stream=stream)
        return GenerateRequest(
            samples=samples,
            is_list=is_batch or counts[0] > 1,
            stream=stream,
            return_prompt_ids=_boolean(body, "return_prompt_token_ids"),
        )

    def make_samples(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        options: Sequence[LogprobOptions],
        rids: Sequence[str],
        *,
        stream: bool,
    ) -> list[Sample]:
        """Make the samples of checked prompts: p0s0, p0s1, p1s0, ..."""
        number = next(self._numbers)
        first_with: dict[tuple[int, ...], int] = {}
        samples: list[Sample] = []
        for prompt, item, option in zip(prompts, params, options, strict=True):
            seed = item.sampling_seed
            base = mix(self.limits.random_seed) + len(samples) + (number << 20) if seed is None else seed
            for index in range(item.n):
                first = first_with.setdefault(tuple(prompt), len(samples))
                samples.append(
                    Sample(
                        rid=rids[len(samples)],
                        prompt=prompt,
                        params=item,
                        logprob=option,
                        stop_ids=self._stop_ids(item),
                        key=sample_seed(base, index),
                        prompt_key=(number, first),
                        cached_tokens=0 if first == len(samples) else _cached(prompt, option),
                        stream=stream,
                    )
                )
        return samples

    def check(self, prompt: Sequence[int], params: SamplingParams, option: LogprobOptions) -> None:
        """Refuse a prompt that the model cannot take."""
        limits = self.limits
        length = len(prompt)
        if length == 0:
            raise semantic_error("input_ids cannot be empty: the prompt has no tokens.")
        if length >= limits.context_length:
            raise semantic_error(
                f"The input ({length} tokens) is longer than the model's context length "
                f"({limits.context_length} tokens)."
            )
        total = length + params.max_new_tokens
        if total > limits.context_length:
            raise semantic_error(
                f"Requested token count exceeds the model's maximum context length of {limits.context_length} "
                f"tokens. You requested a total of {total} tokens: {length} tokens from the input messages and "
                f"{params.max_new_tokens} tokens for the completion. Please reduce the number of tokens in the "
                "input messages or the completion to fit within the limit."
            )
        if total > limits.max_total_tokens:
            raise semantic_error(
                f"The request needs {total} tokens, but the engine holds {limits.max_total_tokens} "
                "(--max-total-tokens). Shorten it or start the engine with more."
            )
        self.check_ids(prompt, "input_ids")
        self.check_ids(option.token_ids, "token_ids_logprob")
        self.check_ids([token for token, _ in params.logit_bias], "logit_bias")

    def check_ids(self, ids: Sequence[int], name: str) -> None:
        """Refuse ids that are not in the vocabulary, naming the first."""
        if ids and not (min(ids) >= 0 and max(ids) < self.limits.vocab_size):
            at, bad = next((at, item) for at, item in enumerate(ids) if not 0 <= item < self.limits.vocab_size)
            raise semantic_error(
                f"{name} must be in [0, {self.limits.vocab_size - 1}], the model's vocabulary; got {bad} at "
                f"position {at}."
            )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        inside = (item for item in params.stop_token_ids if 0 <= item < self.limits.vocab_size)
        return self.limits.eos_token_ids | frozenset(inside)

    def _prompts(self, body: Json) -> tuple[list[list[int]], bool]:
        text, ids = body.get("text"), body.get("input_ids")
        if ids is not None:
            return _id_lists(ids)
        if text is None:
            raise semantic_error("Either text, input_ids or input_embeds should be provided.")
        if isinstance(text, str):
            return [self.tokenizer.encode(text)], False
        if not isinstance(text, list):
            raise field_error(("body", "text", "str"), "string_type", "Input should be a valid string", text)
        for item in text:
            if not isinstance(item, str):
                raise field_error(("body", "text", "list[str]"), "string_type", "Input should be a string", item)
        if not text:
            raise semantic_error("text cannot be an empty list.")
        return [self.tokenizer.encode(item) for item in text], True


def _id_lists(ids: object) -> tuple[list[list[int]], bool]:
    loc = ("body", "input_ids")
    if not isinstance(ids, list):
        raise field_error(loc, "list_type", "Input should be a valid list", ids)
    if not ids:
        raise semantic_error("input_ids cannot be empty.")
    if isinstance(ids[0], list):
        for item in ids:
            _check_int_list(item, loc)
            if not item:
                raise semantic_error("input_ids cannot be empty.")
        return ids, True
    _check_int_list(ids, loc)
    return [ids], False


def _check_int_list(ids: object, loc: tuple[str, ...]) -> None:
    if not isinstance(ids, list):
        raise field_error(loc, "list_type", "Input should be a valid list", ids)
    kinds = set(map(type, ids)) - {int}
    if kinds:
        wrong = ", ".join(sorted(kind.__name__ for kind in kinds))
        message = f"Value error, elements must be int or list; got {wrong}"
        raise field_error(loc, "value_error", message, ids)


def _parse_params(raw: Sequence[object]) -> list[SamplingParams]:
    """Parse each distinct object once: a batch often repeats one."""
    parsed: dict[int, SamplingParams] = {}
    for item in raw:
        if id(item) not in parsed:
            parsed[id(item)] = parse_sampling_params(item)
    return [parsed[id(item)] for item in raw]


def _per_item(value: object, count: int, *, is_batch: bool, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if not is_batch:
        raise semantic_error(f"{name} must not be a list for a single prompt.")
    if len(value) != count:
        raise semantic_error(f"{name} must have one entry a prompt: {count}, got {len(value)}.")
    return value


def _logprob_options(body: Json, count: int, *, is_batch: bool) -> list[LogprobOptions]:
    def column(name: str, kind: type, default: Any) -> list[Any]:
        values = _per_item(body.get(name), count, is_batch=is_batch, name=name)
        for value in values:
            if value is not None and type(value) is not kind:
                raise field_error(("body", name), f"{kind.__name__}_type", f"Input should be {kind.__name__}", value)
        return [default if value is None else value for value in values]

    enabled = column("return_logprob", bool, default=False)
    starts = column("logprob_start_len", int, default=-1)
    tops = column("top_logprobs_num", int, default=0)
    with_text = _boolean(body, "return_text_in_logprobs")
    token_ids = body.get("token_ids_logprob") or []
    if not (isinstance(token_ids, list) and all(type(item) is int for item in token_ids)):
        raise semantic_error("token_ids_logprob must be a list of token ids.")
    for start, top in zip(starts, tops, strict=True):
        if start < -1 or top < 0:
            raise semantic_error(f"logprob_start_len must be >= -1 and top_logprobs_num >= 0, got {start} and {top}.")
    return [
        LogprobOptions(enabled=True, start=start, top_count=top, token_ids=tuple(token_ids), with_text=with_text)
        if on
        else LogprobOptions()
        for on, start, top in zip(enabled, starts, tops, strict=True)
    ]


def _rids(rid: object, counts: Sequence[int], *, is_list: bool) -> list[str]:
    total = sum(counts)
    if rid is None:
        return [uuid.uuid4().hex for _ in range(total)]
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(total)] if is_list else [rid]
    if not isinstance(rid, list) or not all(isinstance(item, str) for item in rid):
        raise field_error(("body", "rid"), "string_type", "Input should be a valid string", rid)
    if len(rid) == total and (is_list or total == 1):
        return rid
    if len(rid) == len(counts):
        return [f"{item}_{index}" for item, n in zip(rid, counts, strict=True) for index in range(n)]
    raise semantic_error(f"rid must have one entry a prompt or a sample, got {len(rid)} for {total}.")


def _cached(prompt: Sequence[int], option: LogprobOptions) -> int:
    most = len(prompt) - 1
    return min(most, option.start) if option.enabled and option.start >= 0 else most


def _boolean(body: Json, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise field_error(("body", name), "bool_type", "Input should be a valid boolean", value)
    return bool(value)
