"""The committed problems: right, unrepeated, and held out where they say so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.arithmetic.problems import split_problems

LIMIT_S = 30.0


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def operand_pairs(path: Path) -> list[frozenset[int]]:
    return [frozenset(int(number) for number in row["prompt"].rstrip("=").split("+")) for row in read_rows(path)]


def test_eval_shares_no_operands_with_train_in_either_order(arithmetic: Path) -> None:
    train, held_out = operand_pairs(arithmetic / "train.jsonl"), operand_pairs(arithmetic / "eval.jsonl")

    assert (len(train), len(held_out)) == (3000, 256)
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_no_problem_is_repeated_in_either_order(arithmetic: Path, name: str) -> None:
    pairs = operand_pairs(arithmetic / name)

    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_labels_are_the_sums(arithmetic: Path, name: str) -> None:
    for row in read_rows(arithmetic / name):
        first, second = row["prompt"].removesuffix("=").split("+")
        assert row == {"prompt": f"{first}+{second}=", "label": str(int(first) + int(second))}


def test_script_writes_the_committed_bytes(arithmetic: Path, tmp_path: Path) -> None:
    script = [sys.executable, "-m", "examples.arithmetic.make_data", "--out", str(tmp_path)]
    subprocess.run(script, cwd=arithmetic.parents[1], check=True, capture_output=True, timeout=LIMIT_S)

    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (arithmetic / name).read_bytes()


def test_eval_stays_the_same_when_train_grows() -> None:
    assert split_problems(num_train=100).eval == split_problems(num_train=4000).eval


def test_asking_for_more_pairs_than_exist_names_the_rule() -> None:
    with pytest.raises(ValueError, match=r"within 2\.\.55 .* got 50 \+ 6"):
        split_problems(largest=9, num_train=50, num_eval=6)
