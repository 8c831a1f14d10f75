"""A bare decoding loop to measure against: what the same model can do when nothing but decoding is asked for.

Plain torch: fused qkv and gate-up, a static cache, scaled_dot_product_attention over left-padded rows, multinomial
sampling. No requests, no log-probs, no promise about bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from services.rollout.engine.architecture import load_config
from services.rollout.engine.checkpoint import iterate_tensors
from services.rollout.engine.rope import rotary_tables


class BareModel:
    """Weights of a Llama or Qwen3 checkpoint and a loop over them."""

    def __init__(self, path: Path) -> None:
        self.config = config = load_config(path)
        tensors = {name: tensor.float() for name, tensor in iterate_tensors(path)}
        self.embedding = tensors["model.embed_tokens.weight"]
        self.head = tensors.get("lm_head.weight", self.embedding)
        self.norm = tensors["model.norm.weight"]
        self.layers = []
        for at in range(config.num_layers):
            layer = {name.split(f"layers.{at}.")[1]: item for name, item in tensors.items() if f"layers.{at}." in name}
            qkv = torch.cat([layer[f"self_attn.{part}_proj.weight"] for part in "qkv"])
            gate_up = torch.cat([layer[f"mlp.{part}_proj.weight"] for part in ("gate", "up")])
            self.layers.append(layer | {"qkv": qkv, "gate_up": gate_up})
        self.cosines, self.sines = rotary_tables(config.rope, head_dim=config.head_dim, num_positions=4096)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> Tensor:
        """Return [prompts, count] sampled ids."""
        config, length = self.config, max(map(len, prompts))
        rows, total = len(prompts), length + count
        ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
        padding = torch.tensor([length - len(prompt) for prompt in prompts])
        shape = (rows, config.num_kv_heads, total, config.head_dim)
        cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in self.layers]
        seen = torch.arange(total)[None, :] >= padding[:, None]
        positions = (torch.arange(length)[None, :] - padding[:, None]).clamp(min=0)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = causal[None, None] & seen[:, None, None, :length] | torch.eye(length, dtype=torch.bool)
        chosen = []
        token = self._sample(self._forward(ids, positions, mask, cache, 0)[:, -1])
        for step in range(count):
            chosen.append(token)
            if step == count - 1:
                break
            at = length + step
            row = self._forward(token, at - padding[:, None], seen[:, None, None, : at + 1], cache, at)
            token = self._sample(row[:, -1])
        return torch.cat(chosen, 1)

    def _sample(self, logits: Tensor) -> Tensor:
        return torch.multinomial(torch.softmax(logits, -1), 1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: list[tuple[Tensor, Tensor]], at: int
    ) -> Tensor:
        config = self.config
        x = self.embedding[ids]
        cos, sin = (table[positions].unsqueeze(1).repeat(1, 1, 1, 2) for table in (self.cosines, self.sines))
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            heads = F.linear(self._norm(x, layer["input_layernorm.weight"]), layer["qkv"])
            heads = heads.view(*ids.shape, -1, config.head_dim)
            sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
            query, key, value = heads.split(sizes, 2)
            if config.qk_norm:
                query = self._norm(query, layer["self_attn.q_norm.weight"])
                key = self._norm(key, layer["self_attn.k_norm.weight"])
            query, key = _turn(query.transpose(1, 2), cos, sin), _turn(key.transpose(1, 2), cos, sin)
            end = at + ids.shape[1]
            keys[:, :, at:end], values[:, :, at:end] = key, value.transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                query, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=True
            )
            x = x + F.linear(attended.transpose(1, 2).reshape(*ids.shape, -1), layer["self_attn.o_proj.weight"])
            gate, up = F.linear(self._norm(x, layer["post_attention_layernorm.weight"]), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["mlp.down_proj.weight"])
        return F.linear(self._norm(x[:, -1:], self.norm), self.head)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
