"""One uniform number for each (seed, token number): counter-based, so that no draw depends on another.

It owns the derivation of seeds and draws. It must never keep state: the same inputs give the same bits in any batch,
any order and after any restart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = 0xFFFFFFFFFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit numbers."""
    value &= MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & MASK
    return value ^ (value >> 31)


def sample_seed(seed: int, sample_index: int) -> int:
    """Return the 64-bit key of sample `sample_index` of a request with `seed`.

    key = mix(mix(seed) + GOLDEN * sample_index), all modulo 2**64. Sample 0 of a request with n > 1 draws what the same
    request with n = 1 draws.
    """
    return mix(mix(seed & MASK) + GOLDEN * sample_index)


def uniforms(keys: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1), one a row, with 53 random bits."""
    value = keys + counters * np.uint64(GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX_2)
    value = value ^ (value >> np.uint64(31))
    return (value >> np.uint64(11)).astype(np.float64) * 2.0**-53
