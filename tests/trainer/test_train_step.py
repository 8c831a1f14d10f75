"""The backend's numbers against an independent float64 computation, and their independence of how the work is cut."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from furlong import records
from services.trainer.backend import TrainResult
from services.trainer.batch import Batch, BatchRules, make_batch
from services.trainer.fsdp_backend import FsdpBackend
from services.trainer.policy import load_lm
from tests.trainer.conftest import BackendMaker
from tests.trainer.reference_maths import grpo_step
from tests.trainer.tiny_model import VOCABULARY, make_groups, make_sample, make_tiny_model

GROUPS = make_groups(num_groups=3, per_group=4, seed=5)


def batch_of(groups: Any, *, num_steps: int = 1, engine_log_probs: bool = False) -> Batch:
    rules = BatchRules(num_steps, VOCABULARY, normalize_by_std=True, require_rollout_log_probs=engine_log_probs)
    return make_batch(groups, rollout_id=0, policy_version=0, rules=rules)


def values(result: TrainResult, step: int = 0) -> dict[str, float | None]:
    return {name: records.reduce_value(value) for name, value in result.steps[step].values.items()}


def gradients(backend: FsdpBackend, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradient of the first step, caught before the optimiser takes it."""
    caught: dict[str, torch.Tensor] = {}
    step = backend._optimizer.step

    def catch(rate: float, *, loss_is_finite: bool) -> Any:
        for name, parameter in backend._named.items():
            caught.setdefault(name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
        return step(rate, loss_is_finite=loss_is_finite)

    backend._optimizer.step = catch  # type: ignore[method-assign]
    backend.train(batch)
    return caught


OPTIONS: list[tuple[dict[str, object], dict[str, Any]]] = [
    ({}, {}),
    ({"rollout_temperature": 0.7}, {"temperature": 0.7}),
    ({"calculate_per_token_loss": True}, {"per_token": True}),
    ({"entropy_coef": 0.3}, {"entropy_coef": 0.3}),
    ({"use_rollout_logprobs": True, "eps_clip_high": 0.4}, {"use_engine_log_probs": True, "eps_clip_high": 0.4}),
]


@pytest.mark.parametrize(("ours", "theirs"), OPTIONS, ids=[str(option) for option, _ in OPTIONS])
def test_step_equals_float64_computation(
    make_backend: BackendMaker, model_dir: Path, ours: dict[str, object], theirs: dict[str, Any]
) -> None:
    expected = grpo_step(load_lm(str(model_dir), key="k"), GROUPS, **theirs)
    backend = make_backend(**ours)
    batch = batch_of(GROUPS)
    got = gradients(backend, batch)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(got[name].double(), gradient, rtol=1e-3, atol=1e-6 * expected.grad_norm)
    found = values(make_backend(**ours).train(batch))
    assert found["train/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    assert found["train/loss"] == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert found["train/entropy_loss"] == pytest.approx(expected.entropy, rel=1e-5)
    assert found["train/train_rollout_logprob_abs_diff"] == pytest.approx(expected.abs_diff, rel=1e-5)


def test_kl_loss_equals_float64_computation(make_backend: BackendMaker, model_dir: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "ref", seed=3)
    lm, ref = load_lm(str(model_dir), key="k"), load_lm(str(other), key="k")
    expected = grpo_step(lm, GROUPS, kl_coef=0.2, ref=ref)
    backend = make_backend(use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k3", ref_load=str(other))
    found = values(backend.train(batch_of(GROUPS)))
    assert found["train/kl_loss"] == pytest.approx(expected.kl, rel=1e-4)
    assert found["train/loss"] == pytest.approx(expected.loss, rel=1e-4)
    assert found["train/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)


def test_log_probs_of_the_rollout_equal_float64(make_backend: BackendMaker, model_dir: Path) -> None:
    expected = grpo_step(load_lm(str(model_dir), key="k"), GROUPS).log_probs
    found = make_backend().train(batch_of(GROUPS)).rollout_values["rollout/log_probs"]
    mean = sum(sum(row) / len(row) for row in expected) / len(expected)
    assert records.reduce_value(found) == pytest.approx(mean, rel=1e-5)


def cut_values(make_backend: BackendMaker, max_tokens: int, *, per_token: bool) -> dict[str, float | None]:
    backend = make_backend(max_tokens_per_gpu=max_tokens, calculate_per_token_loss=per_token)
    return values(backend.train(batch_of(GROUPS)))


@pytest.mark.parametrize("per_token", [False, True], ids=["per_sequence", "per_token"])
@pytest.mark.parametrize("max_tokens", [60, 30, 8, 1])
def test_values_do_not_depend_on_micro_batches(make_backend: BackendMaker, max_tokens: int, per_token: bool) -> None:
    whole, cut = (cut_values(make_backend, limit, per_token=per_token) for limit in (8192, max_tokens))
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert cut[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_shared_prompts_change_no_value(make_backend: BackendMaker) -> None:
    shared, apart = make_backend(), make_backend()
    assert shared._share_prompts
    apart._share_prompts = False
    batch = batch_of(GROUPS)
    with_sharing, without = values(shared.train(batch)), values(apart.train(batch))
    for name, value in without.items():
        assert with_sharing[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_several_steps_use_the_log_probs_of_the_start(make_backend: BackendMaker) -> None:
    result = make_backend(lr=1e-2).train(batch_of(GROUPS, num_steps=2))
    first, second = values(result), values(result, 1)
    assert result.log_probs_time_s is not None
    assert first["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert abs(second["train/ppo_kl"] or 0.0) > 1e-3  # the weights moved in between
    assert second["train/ess_ratio"] is not None and second["train/ess_ratio"] < 1.0


def test_equal_rewards_give_no_gradient(make_backend: BackendMaker) -> None:
    groups = make_groups(seed=2)
    for group in groups:
        for sample in group.samples:
            sample.reward = 1.0
    backend = make_backend()
    found = values(backend.train(batch_of(groups)))
    assert found["train/grad_norm"] == 0.0
    assert found["train/entropy_loss"] is not None and found["train/entropy_loss"] > 0.1
    assert found["train/train_rollout_logprob_abs_diff"] is not None


def test_truncated_masked_tokens_count_nowhere(make_backend: BackendMaker) -> None:
    """30 response tokens, 5 of them masked: the mean is over 25."""
    groups = make_groups(num_groups=1, per_group=4, seed=4)
    del groups[0].samples[:]
    for index, length in enumerate((10, 10, 5, 5)):
        mask = [0] * 5 if index == 2 else [1] * length
        response = list(range(2, 2 + length))
        groups[0].samples.append(make_sample(index, [3, 4, 5], response, reward=float(index % 2), mask=mask))
    result = make_backend(calculate_per_token_loss=True).train(batch_of(groups))
    loss = result.steps[0].values["train/loss"]
    assert isinstance(loss, records.Mean) and loss.count == 25
    advantage = math.sqrt(3) / 2  # rewards 0, 1, 0, 1
    expected = -(-10 * advantage + 10 * advantage + 5 * advantage) / 25
    assert values(result)["train/loss"] == pytest.approx(expected, rel=1e-4)


def test_all_masked_batch_changes_nothing(make_backend: BackendMaker) -> None:
    groups = make_groups(seed=1)
    for group in groups:
        for sample in group.samples:
            sample.loss_mask = bytes(len(sample.response_token_ids))
    backend = make_backend()
    before = {name: parameter.clone() for name, parameter in backend._named.items()}
    found = values(backend.train(batch_of(groups)))
    assert found["train/num_tokens"] == 0
    assert found["train/loss"] is None  # shown n/a, never 0 and never NaN
    assert found["train/grad_norm"] == 0.0
    assert all(torch.equal(before[name], parameter) for name, parameter in backend._named.items())


def test_no_samples_at_all(make_backend: BackendMaker) -> None:
    found = values(make_backend().train(batch_of([])))
    assert found["train/num_tokens"] == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_step_that_is_not_finite_is_skipped(make_backend: BackendMaker, poison: float) -> None:
    backend = make_backend(use_rollout_logprobs=True)
    backend.train(batch_of(GROUPS))
    before = {name: parameter.clone() for name, parameter in backend._named.items()}
    state = backend.state()
    groups = make_groups(num_groups=3, per_group=4, seed=5)
    groups[0].samples[0].rollout_log_probs[0] = -poison
    result = backend.train(batch_of(groups))
    found = values(result)
    assert result.steps[0].skipped and found["train/skipped_steps"] == 1
    assert found["train/loss"] is not None and not math.isfinite(found["train/loss"])
    assert all(torch.equal(before[name], parameter) for name, parameter in backend._named.items())
    after = backend.state()
    assert state is not None and after is not None
    assert all(torch.equal(moment, after.moments[name]) for name, moment in state.moments.items())
    assert after.train_step == 2 and after.optimizer_steps == 1
    healthy = values(backend.train(batch_of(GROUPS)))
    assert healthy["train/loss"] is not None and math.isfinite(healthy["train/loss"])


def test_weights_that_are_not_finite_are_noticed(make_backend: BackendMaker) -> None:
    backend = make_backend()
    assert backend.weights_are_finite()
    with torch.no_grad():
        next(iter(backend._named.values())).view(-1)[3] = math.nan
    assert not backend.weights_are_finite()


def test_same_batch_same_bits(make_backend: BackendMaker) -> None:
    first, second = make_backend(), make_backend()
    first.train(batch_of(GROUPS))
    second.train(batch_of(GROUPS))
    assert all(torch.equal(parameter, second._named[name]) for name, parameter in first._named.items())


def test_bfloat16_is_close_and_keeps_float32_masters(make_config: Any, make_backend: BackendMaker) -> None:
    exact = values(make_backend().train(batch_of(GROUPS)))
    from tests.trainer.one_rank import run_one_rank

    found, master = run_one_rank(make_config(dtype="bfloat16"), batch_of(GROUPS))
    assert master == torch.float32
    assert found["train/grad_norm"] == pytest.approx(exact["train/grad_norm"], rel=0.1)
    assert found["train/entropy_loss"] == pytest.approx(exact["train/entropy_loss"], rel=0.05)
