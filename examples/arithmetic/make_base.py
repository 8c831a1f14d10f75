"""Make base/: a small Qwen3 that knows its sums but often writes one digit wrong.

Owns the recipe of the base model. Training is bounded by steps, runs on one thread and is seeded, so the
same machine makes the same bytes. It never trains on a held-out sum.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.arithmetic.characters import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, ZERO_ID, save_tokenizer
from examples.arithmetic.measure import accuracy
from examples.arithmetic.problems import Problem, Split, split_problems

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
MAX_POSITIONS = 128
# The longest line is 99+99=198 and its end: 6 + 3 + 1.
LINE_TOKENS = 10


@dataclass(frozen=True)
class Recipe:
    """What is trained, in two stages: first right answers, then answers with slips."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    clean_steps: int
    clean_lr: float
    slip_steps: int
    slip_lr: float
    slip_chance: float
    batch_size: int
    seed: int


@dataclass(frozen=True)
class Lines:
    """Right lines `12+7=19<eos>` as tokens, and where their answers stand."""

    tokens: "torch.Tensor"  # [line, LINE_TOKENS], padded on the right
    answer_start: "torch.Tensor"  # [line], column of the first digit of the answer
    answer_end: "torch.Tensor"  # [line], column of the end token


def build_model(recipe: Recipe) -> "Qwen3ForCausalLM":
    """An untrained Qwen3 in float32, its shape divisible for two tensor-parallel ranks."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    return Qwen3ForCausalLM(config)


def practice_lines(split: Split) -> Lines:
    """Every sum that is not held out, in both orders."""
    import torch

    problems = [*split.train, *split.unused]
    problems += [Problem(problem.second, problem.first) for problem in problems if problem.first != problem.second]
    tokens = torch.full((len(problems), LINE_TOKENS), PAD_ID)
    for row, problem in enumerate(problems):
        line = [VOCABULARY[character] for character in problem.prompt + problem.label] + [EOS_ID]
        tokens[row, : len(line)] = torch.tensor(line)
    return Lines(
        tokens=tokens,
        answer_start=torch.tensor([len(problem.prompt) for problem in problems]),
        answer_end=torch.tensor([len(problem.prompt + problem.label) for problem in problems]),
    )


def batches(
    lines: Lines, *, batch_size: int, slip_chance: float, generator: "torch.Generator"
) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """Endless (tokens [batch, LINE_TOKENS], targets [batch, LINE_TOKENS, vocabulary]).

    A target is a distribution over the token at that place: zero outside the answer, certain of the end token,
    and for a digit 1 - slip_chance on the right one with the rest spread evenly over the other nine. That is
    the average of endlessly many answers with slips, so the model learns their share without their noise.
    """
    import torch

    columns = torch.arange(LINE_TOKENS)
    digits = torch.zeros(len(VOCABULARY))
    digits[ZERO_ID : ZERO_ID + 10] = 1.0
    while True:
        chosen = torch.randint(len(lines.tokens), (batch_size,), generator=generator)
        tokens, start, end = lines.tokens[chosen], lines.answer_start[chosen, None], lines.answer_end[chosen, None]
        right = torch.nn.functional.one_hot(tokens, len(VOCABULARY)).float()
        slipped = (1 - slip_chance) * right + slip_chance / 9 * (digits - right)
        digit_here = ((columns >= start) & (columns < end))[:, :, None]
        end_here = (columns == end)[:, :, None]
        yield tokens, digit_here * slipped + end_here * right


def train_stage(
    model: "Qwen3ForCausalLM",
    stream: Iterator[tuple["torch.Tensor", "torch.Tensor"]],
    *,
    name: str,
    steps: int,
    peak_lr: float,
) -> None:
    """Supervised steps with a short warm-up and a linear decay, its loss printed every 50 steps."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (0.03 + 0.97 * (1 - step / steps))
    )
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        tokens, targets = next(stream)
        log_probs = model(input_ids=tokens).logits.log_softmax(dim=-1)
        loss = -(targets[:, 1:] * log_probs[:, :-1]).sum() / targets[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            print(f"{name} {step}/{steps} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


def report(model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerBase", split: Split, *, stage: str) -> None:
    """Print the share of right answers on all of train and of eval, sampled at temperature 1 and greedy."""
    for name, problems in (("train", split.train), ("eval", split.eval)):
        sampled = accuracy(model, tokenizer, problems, temperature=1.0)
        greedy = accuracy(model, tokenizer, problems, temperature=0.0)
        print(f"{stage}: {name} sampled {sampled:.3f} greedy {greedy:.3f}", flush=True)


def make_base(recipe: Recipe, out: Path) -> None:
    """Train and write the checkpoint folder: config, weights in float32, tokenizer."""
    import torch
    from transformers import PreTrainedTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    split = split_problems()
    lines = practice_lines(split)
    model = build_model(recipe)
    print(f"{model.num_parameters():,} parameters, {len(lines.tokens):,} sums to learn from", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(out, max_length=MAX_POSITIONS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    stages = (
        ("clean", recipe.clean_steps, recipe.clean_lr, 0.0),
        ("slips", recipe.slip_steps, recipe.slip_lr, recipe.slip_chance),
    )
    for name, steps, peak_lr, slip_chance in stages:
        stream = batches(lines, batch_size=recipe.batch_size, slip_chance=slip_chance, generator=generator)
        train_stage(model, stream, name=name, steps=steps, peak_lr=peak_lr)
        report(model, tokenizer, split, stage=f"after {name}")
    model.save_pretrained(out)
    print(f"{out}: {(out / 'model.safetensors').stat().st_size / 1e6:.2f} MB of weights")


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(
            "Make the base model: learn all sums but the held-out ones, then learn that one digit of many answers "
            "is wrong. It then knows the sums (greedy answers are nearly all right) but a sampled answer is right "
            "only about 40% of the time, which is what reinforcement learning then puts right."
        ),
        epilog=(
            "Seeded, on one thread, bounded by steps: the same machine and library versions make the same bytes. "
            "A larger --slip-chance makes a worse base model; fewer --clean-steps one that does not know its sums, "
            "which reinforcement learning hardly mends."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=HERE / "base", help="checkpoint folder to write")
    add("--hidden-size", type=int, default=80, help="width of the model")
    add("--intermediate-size", type=int, default=240, help="width of its MLPs")
    add("--num-layers", type=int, default=4, help="transformer layers")
    add("--clean-steps", type=int, default=1200, help="steps on right answers")
    add("--clean-lr", type=float, default=2e-3, help="peak learning rate of those steps")
    add("--slip-steps", type=int, default=100, help="steps on answers with slips")
    add("--slip-lr", type=float, default=5e-4, help="peak learning rate of those steps")
    add("--slip-chance", type=float, default=0.28, help="chance of each digit of those answers to be wrong")
    add("--batch-size", type=int, default=256, help="sums a step")
    add("--seed", type=int, default=0, help="of the initial weights and the order of the sums")
    return parser.parse_args()


def main() -> None:
    flags = vars(parse_flags())
    out = flags.pop("out")
    make_base(Recipe(**flags), out)


if __name__ == "__main__":
    main()
