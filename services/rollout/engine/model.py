"""The forward pass: whole prompts (prefill) and one token for every running sequence (decode).

It owns the arithmetic and nothing else. Its law: a sequence's numbers never depend on which other sequences are in
the call. Each operation works on a row by itself, weights go through `RowGemm`, a prompt attends over itself alone,
and decode attention is a fixed chain of equally shaped chunk products in which masked chunks add exact zeros.
Everything outside the matrix products is float32, also when the weights are bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.rollout.engine.architecture import ModelConfig
from services.rollout.engine.decode_plan import DecodePlan
from services.rollout.engine.kv_cache import KVCache
from services.rollout.engine.linear import RowGemm, choose_row_tile, padded_rows
from services.rollout.engine.parameters import Layer, Parameters
from services.rollout.engine.rope import rotary_tables


class CausalModel:
    """A Llama-like decoder over `Parameters` and a `KVCache`."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, num_slots: int, max_positions: int) -> None:
        self.config = config
        self.parameters = Parameters(config, dtype)
        self.cache = KVCache(config, num_slots=padded_rows(num_slots))
        self.gemm = RowGemm(choose_row_tile(self.parameters.gemm_shapes(), dtype))
        self.cosines, self.sines = rotary_tables(config.rope, head_dim=config.head_dim, num_positions=max_positions)
        self._plans: dict[int, DecodePlan] = {}

    def decode(self, tokens: Tensor, positions: NDArray[np.int64]) -> Tensor:
        """Feed one token to each of the first M slots; return logits [M, padded vocabulary].

        tokens: [M] ids; positions: [M], where each goes. M is a multiple of ROW_STEP; idle slots get any token at 0.
        """
        plan = self._plans.get(len(positions))
        if plan is None:
            plan = DecodePlan(self.config, self.parameters, self.cache, self.gemm, num_rows=len(positions))
            self._plans[len(positions)] = plan
        return plan.run(tokens, positions, self.cosines, self.sines)

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Compute whole prompts into their slots; return hidden states [sum of lengths, hidden], normalised."""
        lengths = [len(prompt) for prompt in prompts]
        total = sum(lengths)
        rows = padded_rows(total)
        tokens = torch.zeros(rows, dtype=torch.int64)
        tokens[:total] = torch.tensor([token for prompt in prompts for token in prompt])
        positions = np.zeros(rows, dtype=np.int64)
        positions[:total] = np.concatenate([np.arange(length) for length in lengths])
        index = self.cache.write_index(np.repeat(np.asarray(slots, dtype=np.int64), lengths), positions[:total])
        where = torch.from_numpy(positions)
        rotary = (self.cosines[where][:, None], self.sines[where][:, None])
        x = self.parameters.embedding[tokens].float()
        for number, layer in enumerate(self.parameters.layers):
            query, key, value = self._project(layer, x, rotary)
            self.cache.write(number, index, key[:total], value[:total])
            attended = torch.zeros(rows, self.config.num_heads * self.config.head_dim)
            start = 0
            for length in lengths:
                part = slice(start, start + length)
                attended[part] = self._attend(query[part], key[part], value[part])
                start += length
            self._finish(layer, x, attended)
        return self.normalise(x, self.parameters.final_norm)[:total]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, padded vocabulary] of normalised hidden states [rows, hidden]."""
        count = hidden.shape[0]
        rows = torch.zeros(padded_rows(count), hidden.shape[1])
        rows[:count] = hidden
        out = torch.empty(rows.shape[0], self.parameters.head.shape[1])
        self.gemm.multiply(rows, self.parameters.head, out)
        out[:, self.config.vocab_size :] = float("-inf")
        return out[:count]

    def normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square normalisation over the last dimension."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps) * weight

    def _project(self, layer: Layer, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        fused = torch.empty(x.shape[0], layer.qkv.shape[1])
        self.gemm.multiply(self.normalise(x, layer.input_norm), layer.qkv, fused)
        if layer.qkv_bias is not None:
            fused += layer.qkv_bias
        heads = fused.view(x.shape[0], -1, config.head_dim)
        mixed = heads[:, : config.num_heads + config.num_kv_heads]
        if layer.qk_norm is not None:
            mixed = self.normalise(mixed, layer.qk_norm)
        low, high = mixed.chunk(2, dim=-1)
        cosines, sines = rotary
        turned = torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
        value = heads[:, config.num_heads + config.num_kv_heads :]
        return turned[:, : config.num_heads], turned[:, config.num_heads :], value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of one prompt over itself; [length, heads, head_dim] -> [length, heads * head_dim]."""
        group = self.config.num_heads // self.config.num_kv_heads
        keys = key.transpose(0, 1).repeat_interleave(group, dim=0)
        values = value.transpose(0, 1).repeat_interleave(group, dim=0)
        queries = query.transpose(0, 1).contiguous()
        out = F.scaled_dot_product_attention(queries[None], keys[None], values[None], is_causal=True)
        return out[0].transpose(0, 1).reshape(query.shape[0], -1)

    def _finish(self, layer: Layer, x: Tensor, attended: Tensor) -> None:
        self.gemm.accumulate(x, attended, layer.output)
        if layer.output_bias is not None:
            x += layer.output_bias
        inner = torch.empty(x.shape[0], layer.gate_up.shape[1])
        self.gemm.multiply(self.normalise(x, layer.post_norm), layer.gate_up, inner)
        if layer.gate_up_bias is not None:
            inner += layer.gate_up_bias
        gate, up = inner.chunk(2, dim=-1)
        self.gemm.accumulate(x, F.silu(gate) * up, layer.down)
        if layer.down_bias is not None:
            x += layer.down_bias
