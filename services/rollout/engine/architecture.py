"""What a checkpoint's config.json says about the model, checked once at start.

It owns the list of architectures and rotary kinds that the forward pass implements, and refuses every other one with
a reason. It must never import torch: the command line and the HTTP side read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3")


class UnsupportedModelError(ValueError):
    """The checkpoint needs something that the engine does not compute."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base, kind and the numbers of a scaled kind."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    rope: RopeConfig = field(default_factory=RopeConfig)


def load_config(model_path: Path) -> ModelConfig:
    """Read config.json (and generation_config.json for the stop tokens) of a checkpoint folder."""
    path = model_path / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UnsupportedModelError(
            f"--model-path must be a checkpoint folder with a config.json, got {str(model_path)!r}"
        ) from None
    except ValueError as error:
        raise UnsupportedModelError(f"{path} must be valid JSON: {error}") from None
    generation = model_path / "generation_config.json"
    extra = json.loads(generation.read_bytes()) if generation.exists() else {}
    return parse_config(raw, generation=extra)


def parse_config(raw: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Turn a config.json mapping into a ModelConfig, or say what is not supported."""
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in SUPPORTED:
        raise UnsupportedModelError(
            f"architectures[0] must be one of {', '.join(SUPPORTED)}, got {architecture!r}; "
            "serve this model with SGLang"
        )
    _refuse_unsupported(raw)
    heads = int(raw["num_attention_heads"])
    bias = bool(raw.get("attention_bias", False))
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    return ModelConfig(
        architecture=architecture,
        model_type=str(raw.get("model_type", "")),
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or is_qwen2,
        output_bias=bias and not is_qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=_eos_ids(raw, generation or {}),
        rope=_rope(raw),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act must be 'silu', got {raw['hidden_act']!r}")
    if raw.get("quantization_config"):
        raise UnsupportedModelError("quantization_config must be absent: quantised weights are not supported")
    window = raw.get("sliding_window")
    layers = raw.get("layer_types") or []
    uses_window = bool(raw.get("use_sliding_window", raw.get("model_type") == "mistral"))
    if (window and uses_window) or any(kind != "full_attention" for kind in layers):
        raise UnsupportedModelError(f"sliding_window must be null, got {window!r}; serve it with SGLang")


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(dict.fromkeys(ids))


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope_type must be one of {', '.join(ROPE_KINDS)}, got {kind!r}; serve this model with SGLang"
        )
    if float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor must be 1.0; serve this model with SGLang")
    return RopeConfig(
        theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(rope.get("factor", 1.0)),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_positions=int(
            rope.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 8192)
        ),
    )
