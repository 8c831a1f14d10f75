"""The sums of the example: which exist, how they are written, and which are held out.

Owns the split. make_data.py and make_base.py both take it from here, so the base model has never seen
a held-out sum either. Never imports torch, and never depends on anything but its arguments.
"""

import random
from dataclasses import dataclass

LARGEST_OPERAND = 99
SPLIT_SEED = 20
NUM_EVAL = 256
NUM_TRAIN = 3000


@dataclass(frozen=True)
class Problem:
    """One sum as the model sees it: `first` + `second`."""

    first: int
    second: int

    @property
    def prompt(self) -> str:
        """The text the model continues, such as `12+7=`."""
        return f"{self.first}+{self.second}="

    @property
    def label(self) -> str:
        """The right continuation, such as `19`."""
        return str(self.first + self.second)

    @property
    def operands(self) -> frozenset[int]:
        """The same for a+b and b+a: what must not be shared between training and held-out problems."""
        return frozenset((self.first, self.second))


@dataclass(frozen=True)
class Split:
    """Disjoint problems: no two, in one list or over all three, have the same operands in either order."""

    train: tuple[Problem, ...]
    eval: tuple[Problem, ...]
    unused: tuple[Problem, ...]


def split_problems(
    *, num_train: int = NUM_TRAIN, num_eval: int = NUM_EVAL, largest: int = LARGEST_OPERAND, seed: int = SPLIT_SEED
) -> Split:
    """Deal every unordered pair of 0..largest into eval, train and unused, each pair in one random order.

    Eval is dealt first, so it stays the same when num_train changes.
    Raises ValueError when there are fewer pairs than asked for.
    """
    num_pairs = (largest + 1) * (largest + 2) // 2
    if num_train < 1 or num_eval < 1 or num_train + num_eval > num_pairs:
        raise ValueError(
            f"num_train + num_eval must be within 2..{num_pairs} (the pairs of 0..{largest}) and each >= 1, "
            f"got {num_train} + {num_eval}: ask for fewer or raise the largest operand"
        )
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(largest + 1) for b in range(a, largest + 1)]
    draw.shuffle(pairs)
    problems = tuple(Problem(a, b) if draw.random() < 0.5 else Problem(b, a) for a, b in pairs)
    dealt = num_eval + num_train
    return Split(train=problems[num_eval:dealt], eval=problems[:num_eval], unused=problems[dealt:])
