"""Decides when a sample has ended.

It owns the order of the rules: length, then stop tokens, then stop strings and expressions. It must never look at
more text than it needs: only the tail that a new token can have completed.
"""

from __future__ import annotations

import re

from services.rollout.engine.sample import FinishReason, Sample
from services.rollout.engine.tokenizer import TextStream, Tokenizer


class TextStops:
    """Looks for stop strings and expressions in a growing text."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer, skip_special_tokens=sample.params.skip_special_tokens)
        self._strings = sample.params.stop
        self._expressions = [re.compile(item) for item in sample.params.stop_regex]
        self._longest = max((len(item) for item in self._strings), default=0)
        self._searched = 0

    def match(self, sample: Sample) -> str | None:
        """Return the stop string or expression that the text now holds."""
        self._stream.extend(sample.output_ids)
        text = self._stream.pending(sample.output_ids)
        start = max(0, self._searched - self._longest)
        self._searched = len(self._stream.text)
        for item in self._strings:
            if text.find(item, start) >= 0:
                return item
        for expression in self._expressions:
            if expression.search(text):
                return expression.pattern
        return None


def finish_reason(sample: Sample, token: int, stops: TextStops | None) -> FinishReason | None:
    """Return why the sample ends with `token`, its newest, or None."""
    if len(sample.output_ids) >= sample.params.max_new_tokens:
        return {"type": "length", "length": len(sample.output_ids)}
    if len(sample.output_ids) < sample.params.min_new_tokens:
        return None
    if token in sample.stop_ids and not sample.params.ignore_eos:  # as in SGLang: stop_token_ids are ignored too
        return {"type": "stop", "matched": token}
    matched = stops.match(sample) if stops else None
    return {"type": "stop", "matched": matched} if matched is not None else None
