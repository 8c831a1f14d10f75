"""From samples to the JSON that /generate answers.

It owns the shape of meta_info and of log-prob entries, and the final text. It runs on the HTTP side and must never
change a sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from services.rollout.engine.sample import PromptLogprobs, Sample, TopEntries
from services.rollout.engine.tokenizer import TextStream, Tokenizer

Json = dict[str, Any]
Entry = tuple[float | None, int, str | None]


class Results:
    """Builds answers for samples of one model."""

    def __init__(self, tokenizer: Tokenizer, version: Callable[[], str], *, with_timings: bool) -> None:
        self.tokenizer = tokenizer
        self.version = version
        self.with_timings = with_timings

    def whole(self, sample: Sample) -> Json:
        """The answer for a finished sample."""
        return {
            "text": self.text(sample),
            "output_ids": sample.output_ids,
            "meta_info": self.meta_info(sample, len(sample.output_ids), last=True),
        }

    def chunk(self, sample: Sample, text: str, count: int) -> Json:
        """The stream chunk of a running sample after `count` tokens."""
        return {
            "text": text,
            "output_ids": sample.output_ids[:count],
            "meta_info": self.meta_info(sample, count, last=False),
        }

    def text(self, sample: Sample) -> str:
        """The text of a finished sample, cut before what stopped it unless no_stop_trim."""
        params, reason = sample.params, sample.finish_reason or {}
        matched = reason.get("matched") if reason.get("type") == "stop" else None
        ids: Sequence[int] = sample.output_ids
        if isinstance(matched, int) and not params.no_stop_trim:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        if isinstance(matched, str) and not params.no_stop_trim and matched in params.stop:
            cut = text.find(matched)
            return text if cut < 0 else text[:cut]
        return text

    def text_stream(self, sample: Sample) -> TextStream:
        """The text of a sample that is streamed."""
        return TextStream(self.tokenizer, skip_special_tokens=sample.params.skip_special_tokens)

    def meta_info(self, sample: Sample, count: int, *, last: bool) -> Json:
        """Everything about a sample after `count` tokens but the tokens themselves."""
        spans = sample.spans
        info: Json = {
            "id": sample.rid,
            "finish_reason": sample.finish_reason if last else None,
            "prompt_tokens": len(sample.prompt),
            "weight_version": spans[-1][0] if last and spans else self.version(),
            "num_retractions": sample.num_retractions,
        }
        if sample.logprob.enabled:
            self._add_logprobs(info, sample, count)
        info["reasoning_tokens"] = 0
        info["completion_tokens"] = count
        info["cached_tokens"] = sample.cached_tokens
        if last:
            info["weight_versions"] = [
                {"version": version, "start": start, "end": end} for version, start, end in spans
            ]
        cached = sample.cached_tokens
        info["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
        info["dp_rank"] = None
        if self.with_timings:
            _add_timings(info, sample, last=last)
        now = time.time()
        if last:
            info["e2e_latency"] = now - sample.created
        info["response_sent_to_client_ts"] = now
        return info

    def _add_logprobs(self, info: Json, sample: Sample, count: int) -> None:
        options = sample.logprob
        prompt = sample.prompt_logprobs or PromptLogprobs(values=[], top=[], by_id=[])
        start = max(options.start, 0)
        info["input_token_logprobs"] = [
            self._entry(value, token, options.with_text)
            for value, token in zip(prompt.values, sample.prompt[start:], strict=False)
        ]
        info["output_token_logprobs"] = [
            self._entry(value, token, options.with_text)
            for value, token in zip(sample.output_logprobs[:count], sample.output_ids, strict=False)
        ]
        info["output_token_logprobs_length"] = count
        if options.top_count:
            info["input_top_logprobs"] = self._tops(prompt.top, options.with_text)
            info["output_top_logprobs"] = self._tops(sample.output_top[:count], options.with_text)
        if options.token_ids:
            info["input_token_ids_logprobs"] = self._tops(prompt.by_id, options.with_text)
            info["output_token_ids_logprobs"] = self._tops(sample.output_by_id[:count], options.with_text)

    def _entry(self, value: float | None, token: int, with_text: bool) -> Entry:
        return (value, token, self.tokenizer.token_text(token) if with_text else None)

    def _tops(self, rows: Sequence[TopEntries | None], with_text: bool) -> list[list[Entry] | None]:
        return [None if row is None else [self._entry(value, token, with_text) for value, token in row] for row in rows]


def _add_timings(info: Json, sample: Sample, *, last: bool) -> None:
    info["queue_time"] = max(sample.first_scheduled - sample.created, 0.0)
    info["forward_entry_time"] = sample.first_scheduled
    info["prefill_finished_time"] = sample.prefilled
    if not last:
        return
    info["request_received_ts"] = sample.created
    info["api_server_dispatch_finish_ts"] = sample.dispatched
    info["request_finished_ts"] = sample.finished
    info["first_token_latency"] = max((sample.first_token or sample.prefilled) - sample.created, 0.0)
    decoded = len(sample.output_ids) - 1
    if decoded > 0 and sample.finished > sample.first_token:
        info["decode_throughput"] = decoded / (sample.finished - sample.first_token)
