"""Makes tiny random checkpoints: a byte-level tokenizer and a two-layer model, in a second and without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 260
EOS_ID = 258
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(folder: Path, *, kind: str = "qwen3", seed: int = 0, dtype: str = "float32", **config: Any) -> Path:
    """Write a checkpoint of `kind` (qwen3, llama or qwen2); more config fields go to transformers as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    import torch
    import transformers

    configs: dict[str, Any] = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }
    make_config, make_model = configs[kind]
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "pad_token_id": 259,
    }
    if kind != "qwen2":
        sizes["head_dim"] = 16
    torch.manual_seed(seed)
    model = make_model(make_config(**sizes | config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25) if parameter.dim() > 1 else parameter.normal_(1, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[2], "pad_token": SPECIALS[3]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"model_max_length": 2048, "clean_up_tokenization_spaces": False})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
