"""Chooses the next token of every row and says how likely it was.

It owns the per-slot sampling parameters as arrays, and the draw: inverse CDF in float64 with one uniform number per
(seed, token number). Log-probs are log_softmax(logits / temperature) over the whole vocabulary, raw at temperature 0;
top_p, top_k and min_p restrict the choice only. It must never use a global random generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.rollout.engine.noise import uniforms
from services.rollout.engine.sampling_params import SamplingParams

Slots = NDArray[np.int64]
COLDEST = 1e-6  # below it, a temperature is 0: the quotient would overflow


@dataclass(frozen=True)
class Draw:
    """Chosen ids, their log-probs, and all log-probs [rows, padded vocabulary]."""

    ids: Tensor
    chosen: Tensor
    logprobs: Tensor


class Sampler:
    """Sampling parameters by slot, and the draw over rows that are slots."""

    def __init__(self, *, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.ones(num_slots, dtype=np.float32)
        self.greedy = np.ones(num_slots, dtype=bool)
        self.filtered = np.zeros(num_slots, dtype=bool)
        self.top_p = np.ones(num_slots, dtype=np.float64)
        self.min_p = np.zeros(num_slots, dtype=np.float64)
        self.top_k = np.full(num_slots, vocab_size, dtype=np.int64)
        self.keys = np.zeros(num_slots, dtype=np.uint64)
        self.counters = np.zeros(num_slots, dtype=np.uint64)

    def assign(self, slot: int, params: SamplingParams, *, key: int, counter: int) -> None:
        """Set a slot's parameters; `counter` is the number of the token that comes next."""
        cold = params.temperature < COLDEST
        self.greedy[slot] = cold or params.top_k == 1
        self.temperature[slot] = 1.0 if cold else params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.top_k[slot] = top_k
        narrow = params.top_p < 1 or top_k < self.vocab_size or params.min_p > 0
        self.filtered[slot] = narrow and not self.greedy[slot]
        self.keys[slot] = key
        self.counters[slot] = counter

    def release(self, slot: int) -> None:
        """Make an idle slot as cheap as possible."""
        self.greedy[slot] = True
        self.filtered[slot] = False
        self.temperature[slot] = 1.0

    def draw(self, logits: Tensor, slots: Slots | slice) -> Draw:
        """Draw one token for each row of logits [rows, padded vocabulary]; `slots` says whose row is whose."""
        temperature = torch.from_numpy(self.temperature[slots])[:, None]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        greedy = self.greedy[slots]
        if greedy.all():
            ids = logits.argmax(-1, keepdim=True)
        else:
            ids = self._sample(logprobs, slots)
            if greedy.any():
                ids = torch.where(torch.from_numpy(greedy)[:, None], logits.argmax(-1, keepdim=True), ids)
        return Draw(ids=ids[:, 0], chosen=logprobs.gather(1, ids)[:, 0], logprobs=logprobs)

    def _sample(self, logprobs: Tensor, slots: Slots | slice) -> Tensor:
        noise = torch.from_numpy(uniforms(self.keys[slots], self.counters[slots]))[:, None]
        probabilities = logprobs.exp()
        ids = self._invert(probabilities, noise)
        rows = np.flatnonzero(self.filtered[slots])
        if len(rows):
            where = torch.from_numpy(rows)
            limits = tuple(
                torch.from_numpy(values[slots][rows])[:, None] for values in (self.top_k, self.top_p, self.min_p)
            )
            ids[where] = self._sample_filtered(probabilities[where], noise[where], limits)
        return ids

    def _sample_filtered(self, probabilities: Tensor, noise: Tensor, limits: Sequence[Tensor]) -> Tensor:
        top_k, top_p, min_p = limits
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        keep = (torch.arange(ordered.shape[1]) < top_k) & (before < top_p) & (ordered >= min_p * ordered[:, :1])
        keep[:, 0] = True
        return order.gather(1, self._invert(ordered * keep, noise))

    def _invert(self, probabilities: Tensor, noise: Tensor) -> Tensor:
        """First index whose cumulative weight exceeds noise * total; an index of weight 0 is never first."""
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        target = noise * cumulative[:, -1:]
        return torch.searchsorted(cumulative, target, right=True).clamp_(max=self.vocab_size - 1)


def top_entries(logprobs: Tensor, count: int) -> list[list[tuple[float, int]]]:
    """Return the `count` most likely (log-prob, id) of each row, best first."""
    values, ids = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    return [
        list(zip(row_values, row_ids, strict=True))
        for row_values, row_ids in zip(values.tolist(), ids.tolist(), strict=True)
    ]
