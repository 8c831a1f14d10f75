"""How often a model answers sums rightly. Owns the measure only: it changes no weights."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from examples.arithmetic.problems import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

# Three digits and the end: no sum of two operands up to 99 needs more.
MAX_RESPONSE_TOKENS = 4


def is_right(response: str, label: str) -> bool:
    """Whether the last number in the response is the label, digit for digit."""
    numbers = re.findall(r"\d+", response)
    return bool(numbers) and numbers[-1] == label


def accuracy(
    model: "Qwen3ForCausalLM",
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    *,
    temperature: float,
    seed: int = 0,
) -> float:
    """Share of problems whose one answer is right; temperature 0 is greedy. Reseeds torch's global generator."""
    import torch

    torch.manual_seed(seed)
    batch = tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True, padding_side="left")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        output = model.generate(
            **batch, max_new_tokens=MAX_RESPONSE_TOKENS, **(sampling if temperature > 0 else {"do_sample": False})
        )
    responses = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(is_right(response, problem.label) for response, problem in zip(responses, problems, strict=True))
    return right / len(problems)
