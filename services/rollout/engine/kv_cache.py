"""Keys and values of the running sequences, in fixed-size chunks of positions.

It owns the layout: chunk first, then slot, then head, so that one chunk of the first M slots is one contiguous block
and attention is a chain of equally shaped products whatever the lengths are. Keys are stored transposed. Everything
is zero until written, since masked positions are still multiplied: garbage there could turn a zero weight into NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.rollout.engine.architecture import ModelConfig

CHUNK = 64  # positions
FIRST_CHUNKS = 4


@dataclass(frozen=True)
class WriteIndex:
    """Flat places in the key and value storage for a set of (slot, position) rows."""

    keys: Tensor  # [rows * kv heads * head_dim]
    values: Tensor  # [rows * kv heads]


class KVCache:
    """Grows by whole chunks as longer sequences come; never shrinks but by `clear`."""

    def __init__(self, config: ModelConfig, *, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_layers = config.num_layers
        self.num_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.num_chunks = 0
        self.generation = 0
        """Changes when storage moves, so that views of it can be dropped."""
        self.keys: list[Tensor] = []  # a layer: [chunks, slots, kv heads, head_dim, CHUNK]
        self.values: list[Tensor] = []  # a layer: [chunks, slots, kv heads, CHUNK, head_dim]
        heads = np.arange(self.num_heads, dtype=np.int64)
        self._heads = heads[None, :]
        self._key_rows = np.arange(self.head_dim, dtype=np.int64) * CHUNK
        self.reserve(FIRST_CHUNKS * CHUNK)

    @staticmethod
    def bytes_per_token(config: ModelConfig) -> int:
        """Memory of one position of one sequence over all layers."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4

    def reserve(self, num_positions: int) -> None:
        """Make room for sequences of this length."""
        needed = -(-num_positions // CHUNK)
        if needed <= self.num_chunks:
            return
        capacity = max(needed, 2 * self.num_chunks)
        lead = (capacity, self.num_slots, self.num_heads)
        for layer in range(self.num_layers):
            keys = torch.zeros(*lead, self.head_dim, CHUNK)
            values = torch.zeros(*lead, CHUNK, self.head_dim)
            if self.num_chunks:
                keys[: self.num_chunks] = self.keys[layer]
                values[: self.num_chunks] = self.values[layer]
                self.keys[layer], self.values[layer] = keys, values
            else:
                self.keys.append(keys)
                self.values.append(values)
        self.num_chunks = capacity
        self.generation += 1

    def clear(self) -> None:
        """Forget everything, also what a broken model may have left (NaN); give the memory back."""
        self.keys, self.values, self.num_chunks = [], [], 0
        self.reserve(FIRST_CHUNKS * CHUNK)

    def copy_slot(self, source: int, target: int, *, num_positions: int) -> None:
        """Give `target` the first positions of `source`."""
        chunks = -(-num_positions // CHUNK)
        for tensor in (*self.keys, *self.values):
            tensor[:chunks, target] = tensor[:chunks, source]

    def write_index(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> WriteIndex:
        """Return where rows (slot, position) are stored."""
        blocks = ((positions // CHUNK) * self.num_slots + slots)[:, None] * self.num_heads + self._heads
        offsets = (positions % CHUNK)[:, None]
        values = blocks * CHUNK + offsets
        keys = (blocks * (self.head_dim * CHUNK) + offsets)[:, :, None] + self._key_rows
        return WriteIndex(keys=torch.from_numpy(keys.reshape(-1)), values=torch.from_numpy(values.reshape(-1)))

    def write(self, layer: int, index: WriteIndex, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, each [rows, kv heads, head_dim]."""
        self.keys[layer].view(-1).index_copy_(0, index.keys, keys.reshape(-1))
        flat = self.values[layer].view(-1, self.head_dim)
        flat.index_copy_(0, index.values, values.reshape(-1, self.head_dim))
