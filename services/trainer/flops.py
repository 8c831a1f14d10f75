"""Floating-point operations of the model by its own sizes, and what a device could do. Pure; guesses nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

PEAK_BF16_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense bf16 peak by words in the device's name, the longer ones first; a device that is not here has no MFU."""


@dataclass(frozen=True)
class ModelSizes:
    """What the operations of one token depend on."""

    matrix_parameters: int
    """Parameters of matrices that a token is multiplied with: all but the embedding table, with the output head."""
    num_layers: int
    attention_width: int
    """Heads times head size."""


def training_flops(sizes: ModelSizes, lengths: Iterable[int]) -> float:
    """Operations to train sequences of these lengths once: three forward passes' worth, no recomputation counted.

    Forward: 2 a matrix parameter and token, and 2 x layers x width x length^2 for causal attention's two products.
    Source: Kaplan et al. (arXiv 2001.08361), section 2.1, with attention by its causal half.
    """
    total = 0.0
    for length in lengths:
        total += 2.0 * sizes.matrix_parameters * length
        total += 2.0 * sizes.num_layers * sizes.attention_width * length**2
    return 3.0 * total


def sizes_of(config: Any, parameters: Iterable[tuple[str, tuple[int, ...]]]) -> ModelSizes:  # Any: a model's config
    """The sizes of a transformers model, from its config and its parameters' names and shapes, tied ones once."""
    text = config.get_text_config()
    matrices = sum(shape[0] * shape[1] for _, shape in parameters if len(shape) == 2)
    tied = bool(getattr(text, "tie_word_embeddings", False))
    # untied: the table is looked up, not multiplied; tied: the one matrix counts as the head
    table = 0 if tied else int(text.vocab_size) * int(text.hidden_size)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelSizes(matrices - table, int(text.num_hidden_layers), int(text.num_attention_heads) * int(head_dim))


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak of a device by its name, computing in dtype. None: not known, so no MFU is shown."""
    if dtype != torch.bfloat16:
        return None
    return next((peak for word, peak in PEAK_BF16_FLOPS.items() if word in device_name), None)
