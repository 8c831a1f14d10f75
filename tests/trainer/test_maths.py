"""Advantages, KL estimators, clipping, averages, log-probs, learning rate: the formulas on their own."""

import math
from itertools import pairwise

import pytest
import torch

from services.trainer import logprobs
from services.trainer.grpo import group_advantages
from services.trainer.kl import kl_estimate
from services.trainer.logprobs import chunked_log_probs, token_log_probs
from services.trainer.losses import policy_terms, token_weights, weighted_sum
from services.trainer.schedule import learning_rate


def test_advantages_use_unbiased_std() -> None:
    got = group_advantages([1.0, 0.0, 0.0, 0.0])
    deviation = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    assert got == pytest.approx([0.75 / (deviation + 1e-6)] + [-0.25 / (deviation + 1e-6)] * 3)


@pytest.mark.parametrize("rewards", [[], [0.3], [0.1] * 7, [1, 1, 1]])
def test_equal_rewards_have_advantage_zero_exactly(rewards: list[float]) -> None:
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_std_normalisation_can_be_left_out() -> None:
    assert group_advantages([3.0, 1.0], normalize_by_std=False) == [1.0, -1.0]


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_k3_is_never_negative(kind: str) -> None:
    tiny = torch.logspace(-7, -2, 2000, dtype=torch.float32)
    difference = torch.cat([tiny, -tiny, torch.tensor([4e-7, 9e-7, 1e-6, 0.0, 100.0, -100.0])])
    assert float(kl_estimate(difference, torch.zeros_like(difference), kind=kind).min()) >= 0.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("distance", [100.0, -100.0, 1e4, -1e4])
def test_kl_gradient_is_finite_far_away(kind: str, distance: float) -> None:
    log_probs = torch.tensor([distance], requires_grad=True)
    value = kl_estimate(log_probs, torch.zeros(1), kind=kind)
    value.sum().backward()
    assert log_probs.grad is not None
    assert torch.isfinite(value).all() and torch.isfinite(log_probs.grad).all()
    if kind == "k3":  # it still pulls the policy back
        assert math.copysign(1, float(log_probs.grad)) == math.copysign(1, distance)


def test_kl_estimators_are_their_formulas() -> None:
    d = torch.tensor([0.7, -0.3], dtype=torch.float64)
    zero = torch.zeros_like(d)
    assert torch.equal(kl_estimate(d, zero, kind="k1"), d)
    assert torch.equal(kl_estimate(d, zero, kind="k2"), 0.5 * d**2)
    torch.testing.assert_close(kl_estimate(d, zero, kind="k3"), torch.exp(-d) - 1 + d)
    assert float(kl_estimate(torch.tensor([-9.0]), torch.zeros(1), kind="low_var_kl")) == 10.0
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_estimate(d, zero, kind="k4")


def test_clipping_bounds_both_sides() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    terms = policy_terms(ratio.log(), torch.zeros(5), advantages, eps_clip=0.2, eps_clip_high=0.3)
    torch.testing.assert_close(terms.loss, torch.tensor([-1.3, 1.5, -0.5, 0.8, -1.0]))
    assert terms.clipped.tolist() == [1, 0, 0, 1, 0]


def test_dual_clip_bounds_negative_advantages_only() -> None:
    log_ratio = torch.tensor([math.log(10.0)] * 2)
    terms = policy_terms(
        log_ratio, torch.zeros(2), torch.tensor([-1.0, 1.0]), eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=3.0
    )
    torch.testing.assert_close(terms.loss, torch.tensor([3.0, -1.2]))
    assert terms.dual_clipped.tolist() == [1, 0]


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_ratio_beyond_float32_is_clipped_or_masked_without_a_nan_gradient(weight: float) -> None:
    log_probs = torch.tensor([0.0, -1.0], requires_grad=True)
    old = torch.tensor([-200.0, -1.0])  # e^200 is no float32
    terms = policy_terms(log_probs, old, torch.ones(2), eps_clip=0.2, eps_clip_high=0.2)
    weighted_sum(terms.loss, torch.tensor([weight, 1.0])).backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [0.0, -1.0]


def test_ratio_beyond_float32_that_nothing_bounds_is_an_infinite_loss() -> None:
    terms = policy_terms(torch.zeros(1), torch.tensor([-200.0]), -torch.ones(1), eps_clip=0.2, eps_clip_high=0.2)
    assert float(terms.loss) == math.inf  # the step is skipped


def test_averages_count_tokens_or_sequences() -> None:
    """0.2 over 100 tokens and 2.0 over 1: by token 0.2178, by sequence 1.1, however they are cut."""
    values = torch.cat([torch.full((100,), 0.2), torch.tensor([2.0])])
    owner = torch.tensor([0] * 100 + [1])
    for per_token, normaliser, expected in ((True, 101, 0.21782), (False, 2, 1.1)):
        weights = token_weights(torch.ones(101), owner, num_sequences=2, per_token=per_token)
        parts = [weighted_sum(values[cut], weights[cut]) for cut in (slice(0, 7), slice(7, 101))]
        assert float(sum(parts)) / normaliser == pytest.approx(expected, rel=1e-4)


def test_masked_tokens_do_not_leak_even_when_not_finite() -> None:
    mask, values = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, math.nan, math.inf])
    weights = token_weights(mask, torch.tensor([0, 0, 1]), num_sequences=2, per_token=False)
    assert float(weighted_sum(values, weights)) == 2.0


def test_log_probs_and_entropy_at_a_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    chosen, entropy = token_log_probs(logits, torch.tensor([1]), temperature=0.7)
    p = torch.softmax(logits[0].double() / 0.7, 0)
    assert float(chosen) == pytest.approx(float(p[1].log()), rel=1e-5)
    assert float(entropy) == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)


def test_impossible_token_leaves_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    _, entropy = token_log_probs(logits, torch.tensor([0]), temperature=1.0)
    assert float(entropy) == pytest.approx(math.log(2), rel=1e-5)


def test_chunks_change_neither_values_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head, hidden, targets = torch.nn.Linear(4, 11), torch.randn(9, 4, requires_grad=True), torch.arange(9)

    def run() -> tuple[torch.Tensor, ...]:
        scores, entropy = chunked_log_probs(hidden, targets, head, vocabulary_size=11, temperature=0.9)
        (gradient,) = torch.autograd.grad((scores + entropy).sum(), hidden)
        return scores, entropy, gradient

    whole = run()
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 22)
    for expected, got in zip(whole, run(), strict=True):
        torch.testing.assert_close(got, expected)


def rates(style: str, *, warmup: int = 0, total: int = 10) -> list[float]:
    return [
        learning_rate(step, peak=1.0, minimum=0.1, warmup_steps=warmup, total_steps=total, style=style)
        for step in range(total + 2)
    ]


def test_learning_rate_warms_up_linearly() -> None:
    assert rates("constant", warmup=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_learning_rate_falls_to_the_minimum_and_stays(style: str) -> None:
    got = rates(style, warmup=2)
    assert got[2] == 1.0 and got[10] == pytest.approx(0.1) and got[11] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in pairwise(got[2:]))
    assert got[6] == pytest.approx(0.55)
