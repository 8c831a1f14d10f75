"""The samples that run now, one a slot, and the two ways to move them on: prefill and decode step.

It owns slots, the arrays that the kernels read, and how tokens and log-probs get from tensors into samples. It must
never decide when a sample ends.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.rollout.engine.linear import padded_rows
from services.rollout.engine.logit_edits import edit_logits
from services.rollout.engine.model import CausalModel
from services.rollout.engine.sample import PromptLogprobs, Sample
from services.rollout.engine.sampling import Draw, Sampler, top_entries

LOGIT_ROWS = 64  # prompt positions whose logits are held at once


class Batch:
    """Running samples. Rows of a decode step are slots 0..M-1; idle ones among them compute nothing of use."""

    def __init__(self, model: CausalModel, *, max_running: int) -> None:
        self.model = model
        num_slots = model.cache.num_slots
        self.sampler = Sampler(num_slots=num_slots, vocab_size=model.config.vocab_size)
        self.by_slot: list[Sample | None] = [None] * num_slots
        self.running: dict[Sample, None] = {}  # in order of admission
        self.reserved_tokens = 0
        self.poisoned = False
        """Whether something that is not a number may be in the cache: there even a weight of 0 would spread it."""
        self._free = list(range(max_running))
        self._tokens = np.zeros(num_slots, dtype=np.int64)
        self._positions = np.zeros(num_slots, dtype=np.int64)
        self._active = np.zeros(num_slots, dtype=np.int64)
        self._special: set[Sample] = set()  # need more than a token and its log-prob

    @property
    def num_free(self) -> int:
        """Slots that are not in use."""
        return len(self._free)

    @property
    def used_tokens(self) -> int:
        """Positions stored for running samples."""
        return int(self._positions.sum())

    def release(self, sample: Sample) -> None:
        """Take a sample out of its slot."""
        slot = sample.slot
        self.by_slot[slot] = None
        self.running.pop(sample)
        self._special.discard(sample)
        self.reserved_tokens -= sample.reserved_tokens
        self._active[slot] = self._positions[slot] = self._tokens[slot] = 0
        self.sampler.release(slot)
        sample.slot = -1
        heapq.heappush(self._free, slot)

    def prefill(self, samples: Sequence[Sample], sequence: int) -> list[Sample]:
        """Give samples slots and compute their prompts; return those that got a new token."""
        now = time.time()
        leaders: dict[tuple[int, int], Sample] = {}
        for sample in samples:
            self._take_slot(sample)
            sample.first_scheduled = sample.first_scheduled or now
            self._plan_replay(sample, sequence)
            if sample.output_ids:
                leaders[(-1, sample.slot)] = sample
            else:
                leaders.setdefault(sample.prompt_key, sample)
        known = [self._known(sample) for sample in leaders.values()]
        self.model.cache.reserve(max(sample.reserved_tokens for sample in samples))
        hidden = self.model.prefill(known, [sample.slot for sample in leaders.values()])
        self.poisoned |= not bool(hidden.sum().isfinite())
        rows = self._share(samples, leaders, [len(item) for item in known], hidden)
        fresh = [sample for sample in samples if not sample.output_ids or not sample.replay]
        for sample in fresh:
            sample.prefilled = time.time()
        return self._first_tokens([sample for sample in fresh if sample.params.max_new_tokens], hidden, rows)

    def _take_slot(self, sample: Sample) -> None:
        slot = heapq.heappop(self._free)
        sample.slot = slot
        self.by_slot[slot] = sample
        self.running[sample] = None
        self.reserved_tokens += sample.reserved_tokens
        self._active[slot] = 1
        counter = len(sample.output_ids)
        self.sampler.assign(slot, sample.params, key=sample.key, counter=counter)
        options = sample.logprob
        if options.top_count or options.token_ids or sample.params.edits_logits:
            self._special.add(sample)

    def _plan_replay(self, sample: Sample, sequence: int) -> None:
        """A retracted sample under the same weights feeds its tokens again one by one, for the same bits as before;
        under new weights there are no bits to keep, and one prefill does it."""
        replays = sample.output_ids and sample.computed_version == sequence
        sample.replay = len(sample.output_ids) if replays else 0
        sample.computed_version = sequence

    def _known(self, sample: Sample) -> list[int]:
        return sample.prompt if sample.replay else sample.prompt + sample.output_ids

    def _share(
        self,
        samples: Sequence[Sample],
        leaders: dict[tuple[int, int], Sample],
        lengths: list[int],
        hidden: Tensor,
    ) -> dict[Sample, int]:
        """Copy leaders' prompts to those with the same; return each sample's last row of `hidden`."""
        rows: dict[Sample, int] = {}
        ends = np.cumsum(lengths)
        for leader, length, end in zip(leaders.values(), lengths, ends, strict=True):
            rows[leader] = int(end) - 1
            self._score_prompt(leader, hidden[int(end) - length : int(end)])
            self._start_at(leader, length)
        for sample in samples:
            if sample not in rows:
                leader = leaders[sample.prompt_key]
                rows[sample] = rows[leader]
                self.model.cache.copy_slot(leader.slot, sample.slot, num_positions=len(sample.prompt))
                self._start_at(sample, len(sample.prompt))
                if sample.logprob == leader.logprob:
                    sample.prompt_logprobs = leader.prompt_logprobs
                else:
                    end = rows[leader] + 1
                    self._score_prompt(sample, hidden[end - len(sample.prompt) : end])
        return rows

    def _start_at(self, sample: Sample, position: int) -> None:
        self._positions[sample.slot] = position
        if sample.replay:
            self._tokens[sample.slot] = sample.output_ids[0]

    def _first_tokens(self, samples: list[Sample], hidden: Tensor, rows: dict[Sample, int]) -> list[Sample]:
        if not samples:
            return []
        where = torch.tensor([rows[sample] for sample in samples])
        distinct, inverse = where.unique(return_inverse=True)
        logits = self.model.logits(hidden[distinct])[inverse]
        self._edit(samples, logits, list(range(len(samples))))
        slots = np.array([sample.slot for sample in samples], dtype=np.int64)
        draw = self.sampler.draw(logits, slots)
        now = time.time()
        ids, chosen = draw.ids.tolist(), draw.chosen.tolist()
        for row, sample in enumerate(samples):
            sample.output_ids.append(ids[row])
            sample.output_logprobs.append(chosen[row])
            sample.first_token = sample.first_token or now
            self._tokens[sample.slot] = ids[row]
            self.sampler.counters[sample.slot] += np.uint64(1)
            if sample in self._special:
                self._record_special(sample, draw, row)
        return samples

    def step(self) -> list[Sample]:
        """One decode step over all running samples; return those that got a new token."""
        count = padded_rows(max(sample.slot for sample in self.running) + 1)
        logits = self.model.decode(torch.from_numpy(self._tokens[:count]), self._positions[:count])
        special = [sample for sample in self.running if sample in self._special] if self._special else []
        self._edit(special, logits, [sample.slot for sample in special])
        draw = self.sampler.draw(logits, slice(0, count))
        self._positions[:count] += self._active[:count]
        ids, chosen = draw.ids.tolist(), draw.chosen.tolist()
        moved: list[Sample] = []
        replaying: list[Sample] = []
        for sample in self.running:
            if sample.replay:
                replaying.append(sample)
                continue
            slot = sample.slot
            sample.output_ids.append(ids[slot])
            sample.output_logprobs.append(chosen[slot])
            moved.append(sample)
        self._tokens[:count] = draw.ids.numpy()
        self.sampler.counters[:count] += np.uint64(1)
        for sample in replaying:
            self._replay_step(sample, draw, ids[sample.slot], chosen[sample.slot], moved)
        for sample in special:
            if not sample.replay and sample.output_ids:
                self._record_special(sample, draw, sample.slot)
        return moved

    def _replay_step(self, sample: Sample, draw: Draw, token: int, chosen: float, moved: list[Sample]) -> None:
        """The step fed a token that is known; feed the next one, or go on as usual after the last."""
        sample.replay -= 1
        slot = sample.slot
        if sample.replay:
            self._tokens[slot] = sample.output_ids[len(sample.output_ids) - sample.replay]
            self.sampler.counters[slot] -= np.uint64(1)
            return
        sample.output_ids.append(token)
        sample.output_logprobs.append(chosen)
        moved.append(sample)

    def _edit(self, samples: Sequence[Sample], logits: Tensor, rows: Sequence[int]) -> None:
        for sample, row in zip(samples, rows, strict=True):
            if sample.params.edits_logits and not (sample.replay > 1):
                edit_logits(logits[row], sample)

    def _record_special(self, sample: Sample, draw: Draw, row: int) -> None:
        options = sample.logprob
        if options.top_count:
            sample.output_top.append(top_entries(draw.logprobs[row : row + 1], options.top_count)[0])
        if options.token_ids:
            values = draw.logprobs[row, torch.tensor(options.token_ids)].tolist()
            sample.output_by_id.append(list(zip(values, options.token_ids, strict=True)))

    def _score_prompt(self, sample: Sample, hidden: Tensor) -> None:
        """Raw log-probs of the prompt's tokens from the start position on."""
        options = sample.logprob
        if not options.enabled or options.start < 0 or sample.prompt_logprobs is not None:
            return
        scored = PromptLogprobs(values=[None], top=[None], by_id=[None])
        if options.start >= len(sample.prompt):
            scored = PromptLogprobs(values=[], top=[], by_id=[])
        last = len(sample.prompt) - 1
        for start in range(options.start, last, LOGIT_ROWS):
            stop = min(start + LOGIT_ROWS, last)
            logprobs = torch.log_softmax(self.model.logits(hidden[start:stop]), dim=-1)
            targets = torch.tensor(sample.prompt[start + 1 : stop + 1])[:, None]
            scored.values.extend(logprobs.gather(1, targets)[:, 0].tolist())
            if options.top_count:
                scored.top.extend(top_entries(logprobs, options.top_count))
            if options.token_ids:
                for row in logprobs[:, torch.tensor(options.token_ids)].tolist():
                    scored.by_id.append(list(zip(row, options.token_ids, strict=True)))
        sample.prompt_logprobs = scored
