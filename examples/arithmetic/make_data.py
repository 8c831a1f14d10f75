"""Write train.jsonl and eval.jsonl: sums to practise on, and sums the run never trains on.

Owns the two files and nothing else. The same flags always give the same bytes.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from examples.arithmetic.problems import NUM_TRAIN, Problem, split_problems

HERE = Path(__file__).resolve().parent


def write_jsonl(path: Path, problems: Iterable[Problem]) -> None:
    """One {"prompt": ..., "label": ...} a line."""
    lines = (json.dumps({"prompt": problem.prompt, "label": problem.label}) for problem in problems)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(
            "Write train.jsonl and eval.jsonl. Every pair of operands is dealt once, in one order: a sum of "
            "eval.jsonl is in train.jsonl neither as a+b nor as b+a, and no file repeats a sum."
        ),
        epilog="problems.py says which sums are held out and how many: the base model must not see them either.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the two files")
    parser.add_argument("--num-train", type=int, default=NUM_TRAIN, help="sums in train.jsonl")
    return parser.parse_args()


def main() -> None:
    flags = parse_flags()
    split = split_problems(num_train=flags.num_train)
    flags.out.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train.jsonl", split.train), ("eval.jsonl", split.eval)):
        write_jsonl(flags.out / name, problems)
        print(f"{flags.out / name}: {len(problems)} sums, first {problems[0].prompt}{problems[0].label}")


if __name__ == "__main__":
    main()
