"""Changes to single rows of logits before the draw: biases, penalties, no early end.

It owns what logit_bias, min_new_tokens and the three penalties mean. Rows are edited one by one: few requests ask for
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.rollout.engine.sample import Sample


def edit_logits(row: Tensor, sample: Sample) -> None:
    """Edit one row of logits [padded vocabulary] in place."""
    params = sample.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*sample.prompt, *sample.output_ids}))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if sample.output_ids and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.tensor(sample.output_ids).unique(return_counts=True)
        row[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias:
        row[token] += bias
    if len(sample.output_ids) < params.min_new_tokens and sample.stop_ids:
        row[torch.tensor(sorted(sample.stop_ids))] = float("-inf")
