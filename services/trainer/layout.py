"""How the samples of an optimiser step lie in padded tensors: rows, micro-batches, ranks. Pure and deterministic.

A row holds one prompt and one or more responses to it. Responses that share a row share the prompt's computation and
see the prompt and themselves alone, so every number is the one that a row of its own would give. The last token of a
response is never an input, since nothing is predicted from it. Every rank gets the same number of micro-batches.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.batch import Batch

SHARED_ROW_TOKENS = 512
"""Widest row that several responses share: attention in it costs width^2 whoever sees whom."""

PADDING = -1
PROMPT = 0


@dataclass(frozen=True)
class Row:
    """Samples of one prompt that are computed together."""

    samples: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Right-padded; causal attention never looks at the padding."""

    input_ids: torch.Tensor
    """[row, width], int64."""
    position_ids: torch.Tensor
    """[row, width], int64."""
    segments: torch.Tensor | None
    """[row, width]: 0 = prompt, n = n-th response of the row, -1 = padding. None: each row has one response."""
    sources: torch.Tensor
    """[token]: where in the flattened rows the hidden state lies that predicts each response token."""
    targets: torch.Tensor
    """[token]: the response tokens."""
    token_indices: torch.Tensor
    """[token]: which of the batch's response tokens each one is."""
    samples: torch.Tensor
    """[token]: which sample of the batch each token belongs to."""
    is_filler: bool = False
    """True: nothing in it counts; a rank computes it because the others compute."""


def plan(
    batch: Batch,
    samples: Sequence[int],
    *,
    rank: int,
    world_size: int,
    max_tokens: int,
    share_prompts: bool,
) -> list[MicroBatch]:
    """The micro-batches of one rank for these samples, in the order to run them.

    max_tokens: padded tokens in one micro-batch; a single longer row is a micro-batch of its own.
    """
    rows = sorted(make_rows(batch, samples, share_prompts=share_prompts), key=lambda row: (-row.width, row.samples))
    cuts = [cut(rows[start::world_size], max_tokens) for start in range(world_size)]
    most = max((len(parts) for parts in cuts), default=0)
    own = [build(batch, part) for part in cuts[rank]]
    return own + [filler()] * (most - len(own))


def make_rows(batch: Batch, samples: Sequence[int], *, share_prompts: bool) -> list[Row]:
    """Rows of samples, those of one group and prompt side by side where that is cheaper."""
    if not share_prompts:
        return [_row(batch, (sample,)) for sample in samples]
    by_prompt: dict[tuple[int, bytes], list[int]] = {}
    for sample in samples:
        by_prompt.setdefault((batch.groups[sample], batch.prompts[sample].tobytes()), []).append(sample)
    rows = []
    for members in by_prompt.values():
        waiting: tuple[int, ...] = ()
        for sample in members:
            if waiting and _row(batch, (*waiting, sample)).width > SHARED_ROW_TOKENS:
                rows.append(_row(batch, waiting))
                waiting = ()
            waiting = (*waiting, sample)
        rows.append(_row(batch, waiting))
    return rows


def _row(batch: Batch, samples: tuple[int, ...]) -> Row:
    return Row(samples, len(batch.prompts[samples[0]]) + sum(len(batch.responses[s]) - 1 for s in samples))


def cut(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows, widest first, cut into micro-batches of at most max_tokens padded tokens."""
    parts: list[list[Row]] = []
    for row in rows:
        fits = parts and parts[-1][0].width * (len(parts[-1]) + 1) <= max_tokens
        # a wide row must not make a [width, width] mask necessary for narrow ones
        alike = parts and (parts[-1][0].width <= SHARED_ROW_TOKENS) == (row.width <= SHARED_ROW_TOKENS)
        if fits and alike:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def build(batch: Batch, rows: Sequence[Row]) -> MicroBatch:
    """The tensors of one micro-batch."""
    width = max(row.width for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    segments = np.full((len(rows), width), PADDING, np.int64)
    offsets = batch.offsets
    sources, targets, tokens, owners = [], [], [], []
    for line, row in enumerate(rows):
        prompt = batch.prompts[row.samples[0]]
        ids[line, : len(prompt)] = prompt
        positions[line, : len(prompt)] = np.arange(len(prompt))
        segments[line, : len(prompt)] = PROMPT
        start = len(prompt)
        for number, sample in enumerate(row.samples, start=1):
            response = batch.responses[sample]
            end = start + len(response) - 1
            ids[line, start:end] = response[:-1]
            positions[line, start:end] = len(prompt) + np.arange(len(response) - 1)
            segments[line, start:end] = number
            sources.append(line * width + np.concatenate([[len(prompt) - 1], np.arange(start, end)]))
            targets.append(response)
            tokens.append(np.arange(offsets[sample], offsets[sample + 1]))
            owners.append(np.full(len(response), sample))
            start = end
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        segments=torch.from_numpy(segments) if any(len(row.samples) > 1 for row in rows) else None,
        sources=torch.from_numpy(np.concatenate(sources).astype(np.int64)),
        targets=torch.from_numpy(np.concatenate(targets)),
        token_indices=torch.from_numpy(np.concatenate(tokens)),
        samples=torch.from_numpy(np.concatenate(owners)),
    )


def filler() -> MicroBatch:
    """The smallest micro-batch; its numbers count nowhere."""
    nothing = torch.zeros(1, dtype=torch.int64)
    row = torch.zeros((1, 1), dtype=torch.int64)
    return MicroBatch(row, row, None, nothing, nothing, nothing, nothing, is_filler=True)


def attention_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a token may see, as an additive mask [row, 1, query, key]: earlier tokens of the prompt and its segment."""
    keys, queries = segments[:, None, :], segments[:, :, None]
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    seen = causal & ((keys == PROMPT) | (keys == queries))
    mask = torch.zeros(seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill(~seen, torch.finfo(dtype).min).unsqueeze(1)


def moved(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch with its tensors on a device."""
    if micro_batch.input_ids.device == device:
        return micro_batch
    segments = micro_batch.segments
    return dataclasses.replace(
        micro_batch,
        input_ids=micro_batch.input_ids.to(device),
        position_ids=micro_batch.position_ids.to(device),
        segments=None if segments is None else segments.to(device),
        sources=micro_batch.sources.to(device),
        targets=micro_batch.targets.to(device),
        token_indices=micro_batch.token_indices.to(device),
        samples=micro_batch.samples.to(device),
    )
