"""The committed base model: its size, its tokenizer, and how often it is right before any reinforcement learning."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.arithmetic.characters import CHARACTERS, EOS_ID, UNK_ID, build_tokenizer
from examples.arithmetic.make_base import batches, practice_lines
from examples.arithmetic.measure import accuracy, is_right
from examples.arithmetic.problems import Problem, split_problems

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def model(arithmetic: Path) -> Qwen3ForCausalLM:
    torch.set_num_threads(1)
    return Qwen3ForCausalLM.from_pretrained(arithmetic / "base").eval()


@pytest.fixture(scope="module")
def tokenizer(arithmetic: Path) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast.from_pretrained(arithmetic / "base")


def test_tokenizer_files_give_back_every_character(arithmetic: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    plain = Tokenizer.from_file(str(arithmetic / "base" / "tokenizer.json"))

    assert plain.decode(plain.encode(CHARACTERS).ids) == CHARACTERS
    assert tokenizer.decode(tokenizer(CHARACTERS)["input_ids"]) == CHARACTERS
    assert plain.to_str() == build_tokenizer().to_str()


def test_tokenizer_adds_nothing_and_marks_the_unknown(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer("12+7=")["input_ids"]) == len("12+7=")
    assert tokenizer("a\n")["input_ids"] == [UNK_ID, UNK_ID]
    assert (tokenizer.eos_token_id, tokenizer.pad_token) == (EOS_ID, "<pad>")
    assert tokenizer.decode([*tokenizer("19")["input_ids"], EOS_ID], skip_special_tokens=True) == "19"


def test_checkpoint_is_a_small_float32_qwen3(arithmetic: Path, model: Qwen3ForCausalLM) -> None:
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.config.vocab_size == 32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 300_000 <= model.num_parameters() <= 2_000_000
    assert (arithmetic / "base" / "model.safetensors").stat().st_size < 2_500_000


def test_base_is_right_a_third_to_a_half_of_the_time_when_sampled(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    share = accuracy(model, tokenizer, split_problems().train[:512], temperature=1.0, seed=0)

    assert 0.30 <= share <= 0.50


def test_base_knows_its_sums_when_greedy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    assert accuracy(model, tokenizer, split_problems().eval, temperature=0.0) >= 0.95


def test_base_is_never_taught_a_held_out_sum() -> None:
    split = split_problems()
    lines = practice_lines(split)
    taught = {tuple(row) for row in lines.tokens.tolist()}
    swapped = tuple(Problem(problem.second, problem.first) for problem in split.eval)
    held_out = practice_lines(type(split)(train=split.eval, eval=(), unused=swapped))

    assert not taught & {tuple(row) for row in held_out.tokens.tolist()}


def test_slips_are_taught_only_on_digits_of_the_answer() -> None:
    lines = practice_lines(split_problems())
    _, targets = next(batches(lines, batch_size=8, slip_chance=0.25, generator=torch.Generator().manual_seed(0)))
    certain = targets.amax(dim=-1)

    assert set(certain.unique().tolist()) == {0.0, 0.75, 1.0}
    assert torch.equal((certain == 1.0).sum(dim=1), torch.ones(8, dtype=torch.long))
    assert torch.allclose(targets.sum(dim=-1), (certain > 0).float())


@pytest.mark.parametrize(
    ("response", "right"), [("19", True), ("12+7=19", True), ("019", False), ("190", False), ("", False)]
)
def test_only_the_last_number_counts(response: str, right: bool) -> None:
    assert is_right(response, "19") is right


@pytest.mark.parametrize("script", ["make_base", "make_data"])
def test_help_answers_without_torch(arithmetic: Path, script: str) -> None:
    code = (
        "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['x', '--help']; "
        f"runpy.run_module('examples.arithmetic.{script}', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=arithmetic.parents[1],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout
