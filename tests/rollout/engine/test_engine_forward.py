"""The engine's numbers are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.rollout.engine.architecture import UnsupportedModelError, load_config, parse_config
from services.rollout.engine.checkpoint import iterate_tensors
from services.rollout.engine.linear import ROW_STEP
from services.rollout.engine.model import CausalModel
from tests.rollout.engine.tiny_model import VOCAB_SIZE, make_checkpoint

TOLERANCE = 1e-4
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama-tied-scaled": {
        "kind": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 500000.0},
    },
    "qwen2": {"num_key_value_heads": 1},
    "qwen3-odd": {"kind": "qwen3", "vocab_size": 261, "num_attention_heads": 6, "head_dim": 24},
}


def load_model(folder: Path, dtype: torch.dtype = torch.float32, *, num_slots: int = 8) -> CausalModel:
    with torch.inference_mode():
        model = CausalModel(load_config(folder), dtype=dtype, num_slots=num_slots, max_positions=2048)
        for name, tensor in iterate_tensors(folder):
            model.parameters.write(name, tensor)
    return model


def generate_greedily(model: CausalModel, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Return ids and log-probs [count, vocabulary]."""
    with torch.inference_mode():
        model.cache.reserve(len(prompt) + count)
        rows = [model.logits(model.prefill([prompt], [3])[-1:])[0].clone()]
        ids = [int(rows[0].argmax())]
        for step in range(count - 1):
            tokens, positions = torch.zeros(ROW_STEP, dtype=torch.int64), np.zeros(ROW_STEP, dtype=np.int64)
            tokens[3], positions[3] = ids[-1], len(prompt) + step
            rows.append(model.decode(tokens, positions)[3].clone())
            ids.append(int(rows[-1].argmax()))
        return ids, torch.stack(rows)[:, : model.config.vocab_size]


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    import transformers

    options = dict(KINDS[name])
    folder = make_checkpoint(tmp_path, kind=options.pop("kind", name), **options)
    model = load_model(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for length in (1, 7, 64, 150):
        prompt = [(7 * at) % VOCAB_SIZE for at in range(length)]
        ids, logits = generate_greedily(model, prompt, 12)
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt + ids[:-1]])).logits[0, length - 1 :]
        assert theirs.argmax(-1).tolist() == ids
        for temperature in (1.0, 0.7):
            ours = torch.log_softmax(logits / temperature, -1)
            assert (ours - torch.log_softmax(theirs / temperature, -1)).abs().max() < TOLERANCE


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype="bfloat16")
    prompt = list(range(40))
    _, exact = generate_greedily(load_model(folder), prompt, 1)
    _, rounded = generate_greedily(load_model(folder, torch.bfloat16), prompt, 1)
    difference = (torch.log_softmax(exact, -1) - torch.log_softmax(rounded, -1)).abs()
    assert 0 < difference.mean() < 0.1


def test_growing_the_cache_keeps_what_is_in_it(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path))
    model.cache.reserve(2000)
    once, _ = generate_greedily(model, list(range(200)), 100)
    small = load_model(tmp_path)
    with torch.inference_mode():
        small.cache.clear()
    assert generate_greedily(small, list(range(200)), 100)[0] == once


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 128, "use_sliding_window": True}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_the_forward_pass_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    raw = {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 2, **sizes}
    parse_config(raw)
    with pytest.raises(UnsupportedModelError, match=words):
        parse_config(raw | change)
