"""Step time of the trainer against a bare transformers training step of the same batch, in the same run, as a ratio.

    python -m benchmarks.trainer [--rounds 5] [--steps 10] [--threads 1] [--equal-groups 0.0]

The bare step is what a script without a framework does: right-padded batch, one forward and backward pass, clipped
policy loss, clip_grad_norm_, fused AdamW. Rounds alternate between the two, so that a busy machine slows both alike.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from furlong.config import RunConfig
from furlong.v1 import sample_pb2
from services.trainer.batch import Batch, BatchRules, make_batch
from services.trainer.fsdp_backend import FsdpBackend
from services.trainer.rank_info import RankInfo

NUM_PROMPTS, PER_PROMPT, VOCABULARY = 32, 8, 32


def make_model(folder: Path) -> Path:
    """Qwen3 of a million parameters: 4 layers, hidden 128."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_groups(*, equal_groups: float) -> list[sample_pb2.Group]:
    """Sums such as 12+7=: prompts of 4 to 6 tokens, answers of 2 to 6; a share of the groups has equal rewards."""
    generator = torch.Generator().manual_seed(1)

    def numbers(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()

    groups = []
    for index in range(NUM_PROMPTS):
        prompt, samples = numbers(4, 7), []
        for number in range(PER_PROMPT):
            response = numbers(2, 7)
            samples.append(
                sample_pb2.Sample(
                    index=number,
                    prompt_token_ids=prompt,
                    response_token_ids=response,
                    rollout_log_probs=[-1.0] * len(response),
                    policy_versions=[sample_pb2.VersionSpan(policy_version=0, start=0, end=len(response))],
                    status=sample_pb2.SAMPLE_STATUS_COMPLETED,
                    reward=1.0 if index < equal_groups * NUM_PROMPTS else float(number % 2),
                )
            )
        groups.append(sample_pb2.Group(group_index=index, samples=samples))
    return groups


def furlong_step(folder: Path, groups: list[sample_pb2.Group], *, threads: int) -> Callable[[], None]:
    """Batch making, training, metrics: all that a step costs on the trainer but the weights' way to the engines."""
    config = RunConfig.model_validate(
        {
            "run": {"rollout_batch_size": NUM_PROMPTS, "n_samples_per_prompt": PER_PROMPT, "num_steps_per_rollout": 1},
            "model": {"hf_checkpoint": str(folder)},
            "trainer": {"lr": 1e-4, "trainer_num_threads": threads},
        }
    )
    backend = FsdpBackend(config, RankInfo(0, 1, torch.device("cpu")))
    rules = BatchRules(1, VOCABULARY, normalize_by_std=True, require_rollout_log_probs=False)

    def step() -> None:
        backend.train(make_batch(groups, rollout_id=0, policy_version=0, rules=rules))

    return step


def bare_step(folder: Path, batch: Batch) -> Callable[[], None]:
    """The same batch, padded on the right, through the same model."""
    from transformers import AutoModelForCausalLM

    lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-4, fused=True)
    rows = [torch.tensor([*p, *r]) for p, r in zip(batch.prompts, batch.responses, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    padding = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    mask = torch.zeros(ids.shape)
    for line, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        mask[line, len(prompt) : len(prompt) + len(response)] = 1.0
    advantages = batch.advantages.unsqueeze(1)

    def step() -> None:
        logits = lm(input_ids=ids, attention_mask=padding).logits[:, :-1]
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        ratio = torch.exp(chosen - chosen.detach())
        loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
        ((loss * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)).mean().backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def median_ms(step: Callable[[], None], count: int) -> float:
    """Median wall time of some calls, milliseconds."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


def main() -> None:
    """Print one JSON object: medians in milliseconds and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--equal-groups", type=float, default=0.0, help="share of groups whose rewards are all equal")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    groups = make_groups(equal_groups=options.equal_groups)
    rules = BatchRules(1, VOCABULARY, normalize_by_std=True, require_rollout_log_probs=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch))
        ours = furlong_step(folder, groups, threads=options.threads)
        bare = bare_step(folder, make_batch(groups, rollout_id=0, policy_version=0, rules=rules))
        for step in (ours, bare):
            median_ms(step, 3)
        rounds = [(median_ms(ours, options.steps), median_ms(bare, options.steps)) for _ in range(options.rounds)]
    result = {
        "furlong_ms": round(statistics.median(pair[0] for pair in rounds), 2),
        "bare_ms": round(statistics.median(pair[1] for pair in rounds), 2),
        "ratio": round(statistics.median(a / b for a, b in rounds), 3),
        "ratio_spread": [round(f(a / b for a, b in rounds), 3) for f in (min, max)],
        "threads": options.threads,
        "equal_groups": options.equal_groups,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
