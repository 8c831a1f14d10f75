"""Judges what an engine answered for one sample and makes a Sample of it. Pure.

Token ids and log-probs are taken as they came; nothing is tokenised again. What does not fit is refused with a reason,
never repaired.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from furlong.v1 import sample_pb2

Json = Mapping[str, Any]  # Any: JSON that an engine wrote

_STATUS = {
    "stop": sample_pb2.SAMPLE_STATUS_COMPLETED,
    "length": sample_pb2.SAMPLE_STATUS_TRUNCATED,
    "abort": sample_pb2.SAMPLE_STATUS_ABORTED,
}


class BadAnswer(ValueError):
    """The engine's answer for a sample cannot be used."""


class WrongVersion(BadAnswer):
    """Another policy version than the wanted one wrote it."""


def read_answer(
    answer: object, *, index: int, prompt_token_ids: Sequence[int], policy_version: int, vocab_size: int
) -> sample_pb2.Sample:
    """The sample that an answer of /generate describes.

    policy_version: the only one that may have written it. Raises BadAnswer. An aborted answer is returned with status
    ABORTED and without tokens: it will be asked for again from the prompt.
    """
    if not isinstance(answer, Mapping):
        raise BadAnswer(f"the answer must be a JSON object, got {type(answer).__name__}")
    meta = answer.get("meta_info")
    if not isinstance(meta, Mapping):
        raise BadAnswer("the answer has no meta_info")
    status = read_status(meta)
    sample = sample_pb2.Sample(index=index, prompt_token_ids=prompt_token_ids, status=status)
    if status == sample_pb2.SAMPLE_STATUS_ABORTED:
        message = (meta.get("finish_reason") or {}).get("message")
        sample.error = f"aborted by the engine: {message or 'no reason given'}"
        return sample
    token_ids = _token_ids(answer.get("output_ids"), vocab_size=vocab_size)
    sample.response_token_ids.extend(token_ids)
    sample.rollout_log_probs.extend(_log_probs(meta, token_ids))
    sample.policy_versions.extend(_versions(meta, len(token_ids), policy_version))
    cached = meta.get("cached_tokens")
    if isinstance(cached, int) and not isinstance(cached, bool) and cached >= 0:
        sample.num_cached_tokens = cached
    text = answer.get("text")
    sample.response = text if isinstance(text, str) else ""
    return sample


def read_status(meta: Json) -> "sample_pb2.SampleStatus":
    """How the sample ended, by the engine's finish reason. Raises BadAnswer."""
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else None
    if kind not in _STATUS:
        raise BadAnswer(f"finish_reason must be of type {', '.join(_STATUS)}, got {reason!r:.100}")
    return _STATUS[kind]


def _token_ids(value: object, *, vocab_size: int) -> list[int]:
    if not isinstance(value, list):
        raise BadAnswer(f"output_ids must be a list of token ids, got {type(value).__name__}")
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise BadAnswer(f"token id {token!r:.50} is not in the vocabulary of {vocab_size}")
    return value


def _log_probs(meta: Json, token_ids: list[int]) -> list[float]:
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        count = len(entries) if isinstance(entries, list) else "none"
        raise BadAnswer(f"{len(token_ids)} tokens but {count} log-probs")
    log_probs = []
    for position, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise BadAnswer(f"the log-prob at position {position} is not of token {token}: {entry!r:.100}")
        log_prob = entry[0]
        if not isinstance(log_prob, int | float) or not math.isfinite(log_prob):
            raise BadAnswer(f"the log-prob at position {position} is not finite: {log_prob!r:.50}")
        log_probs.append(float(log_prob))
    return log_probs


def _versions(meta: Json, num_tokens: int, wanted: int) -> list[sample_pb2.VersionSpan]:
    """The version spans; all tokens covered in order, all written by the wanted version."""
    if num_tokens == 0:
        return []
    told = meta.get("weight_versions")
    if not told:
        told = [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    spans: list[sample_pb2.VersionSpan] = []
    end = 0
    if not isinstance(told, list):
        raise BadAnswer(f"weight_versions must be a list of spans, got {told!r:.100}")
    for item in told:
        start, stop = (item.get("start"), item.get("end")) if isinstance(item, Mapping) else (None, None)
        if start != end or not isinstance(stop, int) or stop <= end:
            raise BadAnswer(f"weight_versions must cover the {num_tokens} tokens without gaps, got {told!r:.200}")
        if str(item.get("version")) != str(wanted):
            raise WrongVersion(
                f"tokens {start}..{stop} were written by policy version {item.get('version')!r}, not {wanted}"
            )
        spans.append(sample_pb2.VersionSpan(policy_version=wanted, start=end, end=stop))
        end = stop
    if end != num_tokens:
        raise BadAnswer(f"weight_versions cover {end} of {num_tokens} tokens")
    return spans
