"""Sampling seeds: a documented hash of ids, so that they never depend on the order of arrival.

seed = first 4 bytes, big endian, without the top bit, of the 16-byte digest
BLAKE2b("furlong.sampling.1|SCOPE|RUN_SEED|ROLLOUT_ID|GROUP_INDEX|SAMPLE_INDEX|RETRY") in UTF-8.
SCOPE is "train", or "eval/NAME" with the set's name. RETRY counts the times that a sample came back empty.
"""

import hashlib
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class SeedScope:
    """What a seed is for: training, or one evaluation set; in one run."""

    run_seed: int
    name: str = "train"

    def sampling_seed(self, *, rollout_id: int, group_index: int, sample_index: int, retry: int = 0) -> int:
        """A seed of 31 bits for one sample."""
        text = f"furlong.sampling.1|{self.name}|{self.run_seed}|{rollout_id}|{group_index}|{sample_index}|{retry}"
        return int.from_bytes(_digest(text)[:4]) & 0x7FFFFFFF


def epoch_order(run_seed: int, epoch: int, size: int, *, shuffle: bool) -> list[int]:
    """The order in which an epoch goes through the prompts; it depends on the seed and the epoch only."""
    order = list(range(size))
    if shuffle:
        random.Random(int.from_bytes(_digest(f"furlong.epoch.1|{run_seed}|{epoch}"))).shuffle(order)
    return order


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
