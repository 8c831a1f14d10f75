"""One decode step for a fixed number of rows, with every buffer and view made beforehand.

A step of a small model is bound by the cost of making tensors, not by arithmetic, so nothing is allocated here while
running but what a reduction needs. It must never look at which rows are in use: idle rows are computed too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.rollout.engine.architecture import ModelConfig
from services.rollout.engine.kv_cache import CHUNK, KVCache, WriteIndex
from services.rollout.engine.linear import RowGemm
from services.rollout.engine.parameters import Layer, Parameters


@dataclass(frozen=True)
class ChunkViews:
    """Scores of `n` chunks and the cache's chunks for these rows, by layer."""

    scores: Tensor  # [chunks, rows, heads, CHUNK]
    score_parts: list[Tensor]  # a chunk: [rows * kv heads, group, CHUNK]
    mask: Tensor  # [chunks, rows, 1, CHUNK]
    bounds: Tensor  # [chunks, 1, 1, CHUNK], the positions
    keys: list[list[Tensor]]  # layer, chunk: [rows * kv heads, head_dim, CHUNK]
    values: list[list[Tensor]]  # layer, chunk: [rows * kv heads, CHUNK, head_dim]


class DecodePlan:
    """The buffers of M rows and the step over them."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, cache: KVCache, gemm: RowGemm, *, num_rows: int
    ) -> None:
        self.config, self.parameters, self.cache, self.gemm = config, parameters, cache, gemm
        self.num_rows = num_rows
        self.slots = np.arange(num_rows, dtype=np.int64)
        self._chunks: dict[int, ChunkViews] = {}
        self._cache_generation = cache.generation
        self._make_activations()
        self._make_heads()

    def _make_activations(self) -> None:
        rows, config = self.num_rows, self.config
        self.x = torch.zeros(rows, config.hidden_size)
        self.normed = torch.zeros(rows, config.hidden_size)
        self.inner = torch.zeros(rows, 2 * config.intermediate_size)
        self.gate = self.inner[:, : config.intermediate_size]
        self.up = self.inner[:, config.intermediate_size :]
        self.gated = torch.zeros(rows, config.intermediate_size)
        self.row_scale = torch.zeros(rows, 1)
        self.out = torch.zeros(rows, self.parameters.head.shape[1])
        self.out_padding = self.out[:, config.vocab_size :]

    def _make_heads(self) -> None:
        rows, config = self.num_rows, self.config
        mixed = config.num_heads + config.num_kv_heads
        half = config.head_dim // 2
        self.qkv = torch.zeros(rows, (mixed + config.num_kv_heads) * config.head_dim)
        heads = self.qkv.view(rows, -1, config.head_dim)
        self.qk, self.v = heads[:, :mixed], heads[:, mixed:]
        self.qk_normed = torch.zeros(rows, mixed, config.head_dim) if config.qk_norm else self.qk
        self.qk_scale = torch.zeros(rows, mixed, 1)
        self.low, self.high = self.qk_normed[..., :half], self.qk_normed[..., half:]
        self.turned = torch.zeros(rows, mixed, config.head_dim)
        self.turned_low, self.turned_high = self.turned[..., :half], self.turned[..., half:]
        self.turned_query, self.key = self.turned[:, : config.num_heads], self.turned[:, config.num_heads :]
        self.query = torch.zeros(rows, config.num_heads, config.head_dim)
        group = config.num_heads // config.num_kv_heads
        self.query_rows = self.query.view(rows * config.num_kv_heads, group, config.head_dim)
        self.attended = torch.zeros(rows, config.num_heads, config.head_dim)
        self.attended_groups = self.attended.view(rows * config.num_kv_heads, group, config.head_dim)
        self.attended_rows = self.attended.view(rows, -1)
        self.score_scale = config.head_dim**-0.5

    def _views(self, num_chunks: int) -> ChunkViews:
        if self._cache_generation != self.cache.generation:
            self._chunks.clear()
            self._cache_generation = self.cache.generation
        views = self._chunks.get(num_chunks)
        if views is None:
            views = self._chunks[num_chunks] = self._make_views(num_chunks)
        return views

    def _make_views(self, num_chunks: int) -> ChunkViews:
        rows, config = self.num_rows, self.config
        lead = rows * config.num_kv_heads
        scores = torch.zeros(num_chunks, rows, config.num_heads, CHUNK)
        group = config.num_heads // config.num_kv_heads
        chunks = range(num_chunks)
        return ChunkViews(
            scores=scores,
            score_parts=[scores[chunk].view(lead, group, CHUNK) for chunk in chunks],
            mask=torch.zeros(num_chunks, rows, 1, CHUNK),
            bounds=torch.arange(num_chunks * CHUNK).view(num_chunks, 1, 1, CHUNK),
            keys=[
                [keys[chunk, :rows].view(lead, config.head_dim, CHUNK) for chunk in chunks] for keys in self.cache.keys
            ],
            values=[
                [values[chunk, :rows].view(lead, CHUNK, config.head_dim) for chunk in chunks]
                for values in self.cache.values
            ],
        )

    def run(self, tokens: Tensor, positions: NDArray[np.int64], cosines: Tensor, sines: Tensor) -> Tensor:
        """See `CausalModel.decode`. The returned buffer is valid until the next step."""
        index = self.cache.write_index(self.slots, positions)
        where = torch.from_numpy(positions)
        views = self._views(int(positions.max()) // CHUNK + 1)
        views.mask.zero_()
        views.mask.masked_fill_(views.bounds > where.view(1, -1, 1, 1), float("-inf"))
        cos = cosines[where].unsqueeze_(1)
        sin = sines[where].unsqueeze_(1)
        self._embed(tokens)
        for number, layer in enumerate(self.parameters.layers):
            self._project(layer, cos, sin)
            self._attend(number, index, views)
            self._finish(layer)
        self._normalise(self.x, self.normed, self.row_scale, self.parameters.final_norm)
        self.gemm.multiply(self.normed, self.parameters.head, self.out)
        if self.out_padding.shape[1]:
            self.out_padding.fill_(float("-inf"))
        return self.out

    def _embed(self, tokens: Tensor) -> None:
        table = self.parameters.embedding
        if table.dtype == torch.float32:
            torch.index_select(table, 0, tokens, out=self.x)
        else:
            self.x.copy_(table[tokens])

    def _normalise(self, x: Tensor, out: Tensor, scale: Tensor, weight: Tensor) -> None:
        torch.mul(x, x, out=out)
        torch.mean(out, -1, keepdim=True, out=scale)
        scale.add_(self.config.norm_eps).rsqrt_()
        torch.mul(x, scale, out=out)
        out.mul_(weight)

    def _project(self, layer: Layer, cos: Tensor, sin: Tensor) -> None:
        self._normalise(self.x, self.normed, self.row_scale, layer.input_norm)
        self.gemm.multiply(self.normed, layer.qkv, self.qkv)
        if layer.qkv_bias is not None:
            self.qkv.add_(layer.qkv_bias)
        if layer.qk_norm is not None:
            self._normalise(self.qk, self.qk_normed, self.qk_scale, layer.qk_norm)
        torch.mul(self.low, cos, out=self.turned_low)
        self.turned_low.addcmul_(self.high, sin, value=-1)
        torch.mul(self.high, cos, out=self.turned_high)
        self.turned_high.addcmul_(self.low, sin)
        self.query.copy_(self.turned_query)

    def _attend(self, number: int, index: WriteIndex, views: ChunkViews) -> None:
        self.cache.write(number, index, self.key, self.v)
        scores, keys, values = views.scores, views.keys[number], views.values[number]
        for part, key in zip(views.score_parts, keys, strict=True):
            torch.bmm(self.query_rows, key, out=part)
        torch.add(views.mask, scores, alpha=self.score_scale, out=scores)
        scores.sub_(scores.amax((0, 3), keepdim=True)).exp_()
        sums = scores.sum(-1)  # [chunks, rows, heads]
        total = sums[0]
        torch.bmm(views.score_parts[0], values[0], out=self.attended_groups)
        for chunk in range(1, len(values)):
            total.add_(sums[chunk])  # in order, one by one: a longer neighbour only adds zeros at the end
            self.attended_groups.baddbmm_(views.score_parts[chunk], values[chunk])
        self.attended.div_(total.unsqueeze_(-1))

    def _finish(self, layer: Layer) -> None:
        self.gemm.accumulate(self.x, self.attended_rows, layer.output)
        if layer.output_bias is not None:
            self.x.add_(layer.output_bias)
        self._normalise(self.x, self.normed, self.row_scale, layer.post_norm)
        self.gemm.multiply(self.normed, layer.gate_up, self.inner)
        if layer.gate_up_bias is not None:
            self.inner.add_(layer.gate_up_bias)
        torch.mul(F.silu(self.gate), self.up, out=self.gated)
        self.gemm.accumulate(self.x, self.gated, layer.down)
        if layer.down_bias is not None:
            self.x.add_(layer.down_bias)
