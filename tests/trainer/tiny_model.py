"""A Qwen3 of 20 thousand parameters, with a tokenizer, in a folder; and samples that a model writes."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from furlong.v1 import sample_pb2

VOCABULARY = 24


def make_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Tied embeddings, grouped-query attention, weights large enough that its choices differ."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {chr(ord("a") + number): number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def make_sample(
    index: int,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    reward: float | None = 0.0,
    log_probs: Sequence[float] = (),
    mask: Sequence[int] = (),
    status: sample_pb2.SampleStatus = sample_pb2.SAMPLE_STATUS_COMPLETED,
    version: int = 0,
) -> sample_pb2.Sample:
    """One sample as rollout would send it."""
    spans = [sample_pb2.VersionSpan(policy_version=version, start=0, end=len(response))] if response else []
    return sample_pb2.Sample(
        index=index,
        prompt_token_ids=prompt,
        response_token_ids=response,
        rollout_log_probs=log_probs,
        loss_mask=bytes(mask),
        policy_versions=spans,
        status=status,
        reward=reward,
    )


def make_groups(
    *, num_groups: int = 2, per_group: int = 4, seed: int = 0, version: int = 0, with_log_probs: bool = True
) -> list[sample_pb2.Group]:
    """Groups of random samples of different lengths, with different rewards and made-up engine log-probs."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(count: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()

    groups = []
    for group in range(num_groups):
        prompt = numbers(3 + group % 3)
        samples = []
        for index in range(per_group):
            length = int(torch.randint(1, 7, (1,), generator=generator))
            log_probs = (-3.0 * torch.rand(length, generator=generator)).tolist() if with_log_probs else ()
            reward = float(torch.rand(1, generator=generator))
            samples.append(
                make_sample(index, prompt, numbers(length), reward=reward, log_probs=log_probs, version=version)
            )
        groups.append(sample_pb2.Group(group_index=group, prompt_index=group, samples=samples))
    return groups
