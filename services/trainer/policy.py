"""The policy: a transformers causal LM that scores response tokens. The only file that imports transformers.

It computes logits for response positions alone. Never draws a random number: it stays in evaluation mode, so that no
dropout moves its log-probs away from the engines'.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from furlong.config import ConfigError
from furlong.config.errors import Problem
from services.trainer.layout import MicroBatch, attention_mask
from services.trainer.logprobs import chunked_log_probs


class Policy(nn.Module):
    """Wraps the LM so that one forward call, and with it one gather of sharded weights, scores a micro-batch."""

    def __init__(self, lm: nn.Module, *, temperature: float, entropy_gradient: bool) -> None:
        """entropy_gradient: whether the entropy is part of the loss."""
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self.compute_dtype = torch.float32
        config: Any = lm.config  # Any: a transformers config of any model
        self.vocabulary_size = int(config.get_text_config().vocab_size)

    def forward(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropies) of the response tokens, both [token], float32, nats, at the sampling temperature."""
        lm: Any = self.lm  # Any: transformers' generated classes
        segments = micro_batch.segments
        mask = None if segments is None else attention_mask(segments, self.compute_dtype)
        output = lm.base_model(
            input_ids=micro_batch.input_ids,
            attention_mask=mask,
            position_ids=None if segments is None else micro_batch.position_ids,
            use_cache=False,
        )
        hidden = output.last_hidden_state.flatten(0, 1)[micro_batch.sources]
        return chunked_log_probs(
            hidden,
            micro_batch.targets,
            self._head(),
            vocabulary_size=self.vocabulary_size,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
        )

    def _head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        lm: Any = self.lm
        softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
        head = lm.get_output_embeddings()
        if softcap is None:
            return head
        return lambda hidden: torch.tanh(head(hidden) / softcap) * softcap


def load_lm(folder: str, *, key: str) -> nn.Module:
    """The causal LM of a folder, float32, evaluation mode. Raises ConfigError naming the key."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # stderr is for people
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError([Problem(key, folder, "must be a folder with a config.json of a transformers causal LM")])
    try:
        lm, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        rule = f"must be a transformers causal LM with safetensors weights: {error}"
        raise ConfigError([Problem(key, folder, rule, "Is the download or copy complete?")]) from error
    mismatched = {name if isinstance(name, str) else name[0] for name in loaded["mismatched_keys"]}
    absent = sorted({*loaded["missing_keys"], *mismatched})
    if absent:  # transformers fills them with random numbers
        rule = f"lacks {len(absent)} of the model's weights, or has them in another shape: {', '.join(absent[:3])}"
        raise ConfigError([Problem(key, folder, rule, "Is the download or copy complete?")])
    return lm.eval()


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the LM, the units that are sharded: the largest ModuleList in it."""
    lists = [module for module in lm.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def attends_to_everything(lm: nn.Module) -> bool:
    """Whether every layer has full attention, so that one mask says what a token sees in all of them."""
    config: Any = lm.config
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return all(kind == "full_attention" for kind in kinds)
    return getattr(text, "sliding_window", None) is None and hasattr(text, "num_attention_heads")


def save_hf_files(lm_folder: str, tokenizer_folder: str, target: Path) -> None:
    """Copy what makes a weights file a model folder: configuration, tokenizer, chat template; no weights."""
    import shutil

    wanted = ("config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json", "vocab.json")
    patterns = (*wanted, "tokenizer*", "merges.txt", "added_tokens.json", "spiece.model")
    for folder in (lm_folder, tokenizer_folder):
        for pattern in patterns if folder else ():
            for path in sorted(Path(folder).glob(pattern)):
                if path.is_file():
                    shutil.copyfile(path, target / path.name)
