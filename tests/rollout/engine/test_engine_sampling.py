"""The draw: right frequencies, right restrictions, no memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from furlong.checksum import bytes_checksum, tensor_checksum
from services.rollout.engine.noise import mix, sample_seed, uniforms
from services.rollout.engine.sampling import Sampler
from services.rollout.engine.sampling_params import SamplingParams

VOCAB = 16
LOGITS = torch.linspace(-2, 2, VOCAB)
DRAWS = 20_000


def frequencies(params: SamplingParams) -> np.ndarray:
    sampler = Sampler(num_slots=DRAWS, vocab_size=VOCAB)
    for slot in range(DRAWS):
        sampler.assign(slot, params, key=sample_seed(slot, 0), counter=slot % 7)
    ids = sampler.draw(LOGITS.expand(DRAWS, VOCAB), slice(0, DRAWS)).ids
    return np.bincount(ids.numpy(), minlength=VOCAB) / DRAWS


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), VOCAB),
        (SamplingParams(temperature=0.5), VOCAB),
        (SamplingParams(top_k=3), 3),
        (SamplingParams(top_p=0.5), None),
        (SamplingParams(min_p=0.3), None),
    ],
)
def test_frequencies_are_the_restricted_distribution(params: SamplingParams, kept: int | None) -> None:
    expected = torch.softmax(LOGITS.double() / params.temperature, -1).numpy()
    order = np.argsort(-expected)
    before = np.cumsum(expected[order]) - expected[order]
    allowed = (np.arange(VOCAB) < params.top_k) & (before < params.top_p)
    allowed &= expected[order] >= params.min_p * expected.max()
    assert kept is None or allowed.sum() == kept
    expected[order[~allowed]] = 0
    expected /= expected.sum()
    got = frequencies(params)
    assert (got[expected == 0] == 0).all()
    assert np.abs(got - expected).max() < 5 * 0.5 / DRAWS**0.5


def test_an_impossible_token_is_never_drawn() -> None:
    sampler = Sampler(num_slots=4096, vocab_size=4)
    for slot in range(4096):
        sampler.assign(slot, SamplingParams(), key=mix(slot), counter=0)
    row = torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf])
    assert set(sampler.draw(row.expand(4096, 4), slice(0, 4096)).ids.tolist()) == {1}


def test_noise_is_uniform_and_a_function_of_key_and_counter() -> None:
    keys = np.array([sample_seed(seed, 0) for seed in range(5000)], dtype=np.uint64)
    counters = np.arange(5000, dtype=np.uint64)
    draws = uniforms(keys, counters)
    assert ((draws >= 0) & (draws < 1)).all()
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.05
    shuffled = np.random.default_rng(0).permutation(5000)
    assert (uniforms(keys[shuffled], counters[shuffled]) == draws[shuffled]).all()


def test_the_derivation_of_seeds_never_changes() -> None:
    assert mix(1) == 0x5692161D100B05E5
    assert sample_seed(42, 0) == mix(mix(42))
    assert sample_seed(42, 1) == mix(mix(42) + 0x9E3779B97F4A7C15)


def test_a_checksum_is_of_the_bytes_whatever_the_strides() -> None:
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous()) != tensor_checksum(tensor)
    assert tensor_checksum(torch.zeros(2)) == bytes_checksum(bytes(8))
    assert tensor_checksum(torch.zeros(0)) == bytes_checksum(b"")
