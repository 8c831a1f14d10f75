"""The model's tensors, stored the way the forward pass wants them, addressed by their Hugging Face names.

It owns the fused, transposed storage (q, k, v in one matrix, gate and up in one) and the views that write a named
tensor into its place. It must never decide whether the weights are valid: that is the update session's job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.rollout.engine.architecture import ModelConfig
from services.rollout.engine.linear import GemmShape

VOCAB_STEP = 16  # the logits' width is a multiple of this, so that no vector loop has a tail of another kind

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass
class Layer:
    """One block. Matrices are [in, out]; `qk_norm` is [heads + kv heads, head_dim]."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor
    qk_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass
class Target:
    """Where a named tensor lives: views in the tensor's own shape (more than one when it is stored twice)."""

    shape: tuple[int, ...]
    views: list[Tensor] = field(default_factory=list)


class Parameters:
    """All tensors of the model, zero until they are written."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        width = -(-config.vocab_size // VOCAB_STEP) * VOCAB_STEP
        self.embedding = torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype)
        self.head = torch.zeros(config.hidden_size, width, dtype=dtype)
        self.final_norm = torch.zeros(config.hidden_size)
        self.layers: list[Layer] = []
        self.targets: dict[str, Target] = {}
        self._add(EMBEDDING, self.embedding)
        self._add("model.norm.weight", self.final_norm)
        self._add_head()
        for index in range(config.num_layers):
            self.layers.append(self._make_layer(f"model.layers.{index}."))

    def required_names(self) -> list[str]:
        """Names that a complete update must bring; a tied head comes with the embedding."""
        return [name for name in self.targets if not (name == HEAD and self.config.tie_embeddings)]

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor of the right shape into its place."""
        for view in self.targets[name].views:
            view.copy_(tensor)

    def read(self, name: str) -> Tensor:
        """Return a contiguous copy of a named tensor, in its own shape and the engine's dtype."""
        return self.targets[name].views[0].to(self.dtype).contiguous()

    def gemm_shapes(self) -> list[GemmShape]:
        """Every way in which rows are multiplied by a matrix."""
        layer = self.layers[0]
        plain = [GemmShape(*weight.shape, accumulates=False) for weight in (layer.qkv, layer.gate_up, self.head)]
        return plain + [GemmShape(*weight.shape, accumulates=True) for weight in (layer.output, layer.down)]

    def size_bytes(self) -> int:
        """Memory that the tensors take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage())

    def _storage(self) -> Iterator[Tensor]:
        yield from (self.embedding, self.head, self.final_norm)
        for layer in self.layers:
            yield from (value for value in vars(layer).values() if value is not None)

    def _add(self, name: str, *views: Tensor) -> None:
        self.targets[name] = Target(shape=tuple(views[0].shape), views=list(views))

    def _add_head(self) -> None:
        head = self.head[:, : self.config.vocab_size].t()
        if self.config.tie_embeddings:
            self._add(EMBEDDING, self.embedding, head)
            self._add(HEAD, self.embedding, head)
        else:
            self._add(HEAD, head)

    def _make_layer(self, prefix: str) -> Layer:
        config = self.config
        query = config.num_heads * config.head_dim
        key = config.num_kv_heads * config.head_dim
        layer = Layer(
            qkv=self._matrix(config.hidden_size, query + 2 * key),
            output=self._matrix(query, config.hidden_size),
            gate_up=self._matrix(config.hidden_size, 2 * config.intermediate_size),
            down=self._matrix(config.intermediate_size, config.hidden_size),
            input_norm=torch.zeros(config.hidden_size),
            post_norm=torch.zeros(config.hidden_size),
        )
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        layer.qkv_bias = self._fuse(
            layer.qkv, attention, ("q_proj", "k_proj", "v_proj"), (query, key, key), config.qkv_bias
        )
        layer.output_bias = self._fuse(layer.output, attention, ("o_proj",), (config.hidden_size,), config.output_bias)
        inner = config.intermediate_size
        layer.gate_up_bias = self._fuse(layer.gate_up, mlp, ("gate_proj", "up_proj"), (inner, inner), config.mlp_bias)
        layer.down_bias = self._fuse(layer.down, mlp, ("down_proj",), (config.hidden_size,), config.mlp_bias)
        self._add(prefix + "input_layernorm.weight", layer.input_norm)
        self._add(prefix + "post_attention_layernorm.weight", layer.post_norm)
        if config.qk_norm:
            self._add_qk_norm(layer, attention)
        return layer

    def _matrix(self, depth: int, width: int) -> Tensor:
        return torch.zeros(depth, width, dtype=self.dtype)

    def _fuse(
        self, matrix: Tensor, prefix: str, names: tuple[str, ...], widths: tuple[int, ...], bias: bool
    ) -> Tensor | None:
        fused_bias = torch.zeros(matrix.shape[1]) if bias else None
        start = 0
        for name, width in zip(names, widths, strict=True):
            columns = slice(start, start + width)
            self._add(f"{prefix}{name}.weight", matrix[:, columns].t())
            if fused_bias is not None:
                self._add(f"{prefix}{name}.bias", fused_bias[columns])
            start += width
        return fused_bias

    def _add_qk_norm(self, layer: Layer, attention: str) -> None:
        heads = self.config.num_heads
        layer.qk_norm = torch.zeros(heads + self.config.num_kv_heads, self.config.head_dim)
        self._add(attention + "q_norm.weight", *layer.qk_norm[:heads])
        self._add(attention + "k_norm.weight", *layer.qk_norm[heads:])
