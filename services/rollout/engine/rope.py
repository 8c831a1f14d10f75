"""Rotary position tables.

It owns the angles (default, linear and llama3 scaling). It must never see activations: the forward pass applies them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.rollout.engine.architecture import RopeConfig


def rotary_tables(rope: RopeConfig, *, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [num_positions, head_dim / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    angles = torch.arange(num_positions).float()[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow the low frequencies down, keep the high ones, blend between (Llama 3.1's published rule)."""
    lengths = 2 * math.pi / frequencies
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    blend = (rope.original_max_positions / lengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(lengths > low, frequencies / rope.factor, mixed)
    return torch.where(lengths < high, frequencies, scaled)
