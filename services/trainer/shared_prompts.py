"""Whether a model scores a response the same beside others in a row as in a row of its own. Checked, not assumed."""

import numpy as np
import structlog
import torch

from services.trainer import layout
from services.trainer.batch import Batch
from services.trainer.policy import Policy

log = structlog.get_logger()

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Nats. Sound differences are rounding, 1e-6 in float32; a model that ignores the mask is off by whole nats."""


def sharing_is_exact(policy: Policy) -> bool:
    """Score three short responses to one prompt both ways. Collective when the policy is sharded."""
    probe = _probe(policy.vocabulary_size)
    device = next(policy.parameters()).device
    together, apart = (_scores(policy, probe, share_prompts=share, device=device) for share in (True, False))
    difference = float((together - apart).abs().max())
    exact = difference <= TOLERANCE[policy.compute_dtype]
    log.info("shared_prompts_checked", used=exact, max_difference=difference)
    return exact


def _scores(policy: Policy, probe: Batch, *, share_prompts: bool, device: torch.device) -> torch.Tensor:
    scores = torch.zeros(len(probe.loss_mask), device=device)
    samples = range(probe.num_samples)
    planned = layout.plan(probe, samples, rank=0, world_size=1, max_tokens=64, share_prompts=share_prompts)
    with torch.no_grad():
        for micro_batch in planned:
            moved = layout.moved(micro_batch, device)
            scores[moved.token_indices] = policy(moved)[0]
    return scores


def _probe(vocabulary_size: int) -> Batch:
    prompt = np.arange(1, 5) % vocabulary_size
    responses = [np.array(ids) % vocabulary_size for ids in ([5, 6, 7], [8, 9], [7, 5, 9, 6])]
    tokens = sum(len(response) for response in responses)
    return Batch(
        rollout_id=0,
        policy_version=0,
        prompts=(prompt,) * len(responses),
        responses=tuple(responses),
        groups=(0,) * len(responses),
        advantages=torch.zeros(len(responses)),
        loss_mask=torch.ones(tokens),
        rollout_log_probs=torch.zeros(tokens),
        has_rollout_log_probs=torch.zeros(tokens, dtype=torch.bool),
        steps=(0,) * len(responses),
        num_steps=1,
        stalenesses=(0,) * len(responses),
        num_excluded=0,
    )
