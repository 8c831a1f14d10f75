"""Which prompts come next: epochs, shuffled by the seed, and a position that can be saved and restored.

Pure apart from remembering one epoch's order. Never ends: after the last prompt comes the next epoch.
"""

from dataclasses import dataclass, replace

from services.rollout.prompts import Prompt, PromptSet
from services.rollout.seeds import epoch_order


@dataclass(frozen=True)
class FeedPosition:
    """Where the run is in its data, before the next draw."""

    fingerprint: str
    """Of the data set that epoch and offset count in."""
    epoch: int = 0
    offset: int = 0
    """Prompts already drawn in this epoch."""
    num_groups: int = 0
    """Groups drawn since the start of the run, over all data sets: the next group_index."""


@dataclass(frozen=True)
class Draw:
    """A prompt drawn for one group."""

    group_index: int
    epoch: int
    prompt: Prompt


class PromptFeed:
    """Draws prompts of one data set."""

    def __init__(self, prompts: PromptSet, *, run_seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._run_seed = run_seed
        self._shuffle = shuffle
        self._order: tuple[int, list[int]] = (-1, [])
        self._by_line = {prompt.index: prompt for prompt in prompts.prompts}

    def start(self) -> FeedPosition:
        """The position of a fresh run."""
        return FeedPosition(self._prompts.fingerprint)

    def draw(self, position: FeedPosition, count: int) -> tuple[list[Draw], FeedPosition]:
        """The next `count` prompts, and the position after them; the position given must be of this data set."""
        assert position.fingerprint == self._prompts.fingerprint
        draws: list[Draw] = []
        epoch, offset = position.epoch, position.offset
        while len(draws) < count:
            order = self._epoch(epoch)
            if offset >= len(order):
                epoch, offset = epoch + 1, 0
                continue
            prompt = self._prompts.prompts[order[offset]]
            draws.append(Draw(position.num_groups + len(draws), epoch, prompt))
            offset += 1
        return draws, replace(position, epoch=epoch, offset=offset, num_groups=position.num_groups + count)

    def adopt(self, saved: FeedPosition) -> tuple[FeedPosition, str]:
        """The position to go on from, and a warning when the data set is not the one that was saved (else empty)."""
        if saved.fingerprint == self._prompts.fingerprint:
            return saved, ""
        warning = (
            "the prompts changed since the checkpoint (another file, tokenizer, template or length limit): "
            f"starting at the beginning of the new set of {len(self._prompts.prompts)} prompts; "
            f"the old position was epoch {saved.epoch}, prompt {saved.offset}"
        )
        return replace(self.start(), num_groups=saved.num_groups), warning

    def prompt_at(self, line: int) -> Prompt | None:
        """The prompt of a line of the file, counted from 0."""
        return self._by_line.get(line)

    def _epoch(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = epoch_order(self._run_seed, epoch, len(self._prompts.prompts), shuffle=self._shuffle)
            self._order = (epoch, order)
        return self._order[1]
