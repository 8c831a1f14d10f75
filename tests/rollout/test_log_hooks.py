"""The users' log functions: only True takes the logging over; whatever else they do, logging goes on."""

import time
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from furlong.config import ConfigError
from services.rollout.log_hooks import LogHooks
from services.rollout.sample_view import flags_of
from tests.rollout import user_functions
from tests.rollout.world import make_config, until, world, write_lines

HERE = "tests.rollout.user_functions"


def hooks_of(tmp_path: Path, name: str, **rollout: Any) -> LogHooks:
    config = make_config(tmp_path, custom_rollout_log_function_path=f"{HERE}.{name}", **rollout)
    return LogHooks(config, flags_of(config))


@pytest.mark.parametrize(
    ("name", "handled", "warning"),
    [
        ("log_true", True, ""),
        ("log_async_true", True, ""),
        ("log_false", False, ""),
        ("log_none", False, "log_hook_answer_not_bool"),
        ("log_zero", False, "log_hook_answer_not_bool"),
        ("log_one", False, "log_hook_answer_not_bool"),
        ("log_text", False, "log_hook_answer_not_bool"),
        ("log_raising", False, "log_hook_failed"),
        ("log_slow", False, "log_hook_failed"),
    ],
)
async def test_only_true_takes_the_logging_over(tmp_path: Path, name: str, handled: bool, warning: str) -> None:
    hooks = hooks_of(tmp_path, name, log_hook_timeout_s=0.2)
    started = time.monotonic()
    with structlog.testing.capture_logs() as logs:
        assert await hooks.handled_rollout(3, [], {}, 1.0) is handled
    assert time.monotonic() - started < 0.9
    assert [entry["event"] for entry in logs] == ([warning] if warning else [])
    assert all(entry["hook"] == f"{HERE}.{name}" for entry in logs)


async def test_an_answer_that_is_no_bool_is_warned_of_once(tmp_path: Path) -> None:
    hooks = hooks_of(tmp_path, "log_none")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await hooks.handled_rollout(3, [], {}, 1.0)
    assert len(logs) == 1


async def test_no_hook_costs_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    hooks = LogHooks(config, flags_of(config))
    assert not hooks.wants_rollouts
    assert await hooks.handled_rollout(3, [], {}, 1.0) is False


def test_a_bad_path_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="custom_rollout_log_function_path"):
        hooks_of(tmp_path, "no_such_function")


async def test_a_hook_that_handles_a_rollout_gets_copies_and_the_row_still_completes(tmp_path: Path) -> None:
    user_functions.CALLS.clear()
    config = make_config(tmp_path, custom_rollout_log_function_path=f"{HERE}.log_true")
    async with world(config) as w:
        groups, summary = await w.batch(0)
        await until(lambda: w.telemetry.rows)
        assert w.telemetry.rows == [("rollout/step", 0, {}, 1)]
        [(rollout_id, args, samples, extra, rollout_time)] = user_functions.CALLS
        assert (rollout_id, len(samples), args.rm_type) == (0, 8, "exact_match")
        assert extra["rollout/num_samples"] == 8
        assert rollout_time == summary.rollout_time_s
        again, _ = await w.batch(0)
        assert again == groups
        assert all(sample.reward >= 0 for group in again for sample in group.samples)


async def test_a_hook_that_raises_leaves_the_default_values(tmp_path: Path) -> None:
    config = make_config(tmp_path, custom_rollout_log_function_path=f"{HERE}.log_raising")
    async with world(config) as w:
        await w.batch(0)
        await until(lambda: w.telemetry.rows)
        assert w.telemetry.rows[0][2]["rollout/num_samples"].value == 8


async def test_the_evaluation_hook_gets_miles_data(tmp_path: Path) -> None:
    from furlong.v1 import rollout_pb2

    user_functions.CALLS.clear()
    data = write_lines(tmp_path / "eval.jsonl", [{"prompt": "abc", "label": "x"}] * 2)
    config = make_config(
        tmp_path, eval_prompt_data=("s", str(data)), custom_eval_rollout_log_function_path=f"{HERE}.log_eval"
    )
    async with world(config) as w:
        await w.stub.Evaluate(rollout_pb2.EvaluateRequest(rollout_id=4, policy_version=0), timeout=10)
        assert w.telemetry.rows == []
        [(rollout_id, told, extra)] = user_functions.CALLS
        assert (rollout_id, told["s"]["rewards"], told["s"]["truncated"]) == (4, [0.0, 0.0], [False, False])
        assert extra["eval/s"] == 0.0
