"""The users' log functions: only True takes the logging over; whatever else they do, logging goes on."""

import copy
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from furlong.config import ConfigError
from furlong.records import Histogram, Last
from furlong.v1 import rollout_pb2, sample_pb2
from services.rollout.flags import flags_of
from services.rollout.log_hooks import LogHooks
from services.rollout.reporting import MAX_WAITING, Reporter
from services.rollout.sample_view import Sample, view_sample
from services.rollout.unfinished_reports import UnfinishedReports
from tests.rollout import user_functions
from tests.rollout.world import FakeTelemetry, code_of, make_config, rollout_of, router_of, until, world, write_lines

HERE = "tests.rollout.user_functions"


def hooks_of(tmp_path: Path, name: str, **rollout: Any) -> LogHooks:
    config = make_config(tmp_path, custom_rollout_log_function_path=f"{HERE}.{name}", **rollout)
    return LogHooks(config, flags_of(config))


def reporter_of(tmp_path: Path, telemetry: FakeTelemetry, name: str) -> Reporter:
    kept = UnfinishedReports(tmp_path / "reports")
    return Reporter(telemetry, hooks_of(tmp_path, name), kept)  # type: ignore[arg-type]


def report(reporter: Reporter, rollout_id: int, values: dict[str, Any]) -> None:
    """As is done for a batch."""
    given = reporter.rollout_report(rollout_id, values, attempt=reporter.telemetry.attempt)
    reporter.note_rollout(given)
    reporter.report_rollout(given, samples=list, rollout_time_s=1.0)


def never(rollout_id: int, attempt: int) -> bool:
    return False


@pytest.mark.parametrize(
    ("name", "handled", "warning"),
    [
        ("log_true", True, ""),
        ("log_async_true", True, ""),
        ("log_async_object", True, ""),
        ("log_async_partial", True, ""),
        ("log_async_hanging", False, "log_hook_failed"),
        ("log_setting", False, "log_hook_failed"),
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
        assert await hooks.handled_rollout(3, list, {}, 1.0) is handled
    assert time.monotonic() - started < 0.9
    assert [entry["event"] for entry in logs] == ([warning] if warning else [])
    assert all(entry["hook"] == f"{HERE}.{name}" for entry in logs)


async def test_an_answer_that_is_no_bool_is_warned_of_once(tmp_path: Path) -> None:
    hooks = hooks_of(tmp_path, "log_none")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await hooks.handled_rollout(3, list, {}, 1.0)
    assert len(logs) == 1


async def test_no_hook_costs_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    telemetry, looked_at = FakeTelemetry(), []
    hooks, kept = LogHooks(config, flags_of(config)), UnfinishedReports(tmp_path / "reports")
    reporter = Reporter(telemetry, hooks, kept)  # type: ignore[arg-type]
    given = reporter.rollout_report(3, {}, attempt=1)
    reporter.report_rollout(given, samples=lambda: looked_at.append(3) or [], rollout_time_s=1.0)
    reporter.report_evaluation(3, {"eval/x": Last(1)}, samples=lambda: looked_at.append(3) or {})
    await reporter.close()
    assert len(telemetry.rows) == 2 and looked_at == []
    assert list((tmp_path / "reports").iterdir()) == []


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


async def test_a_hook_sees_the_same_samples_after_a_restart(tmp_path: Path) -> None:
    user_functions.CALLS.clear()
    hooks = {"custom_rm_path": f"{HERE}.as_dict", "custom_rollout_log_function_path": f"{HERE}.log_samples"}
    config = make_config(tmp_path, rm_type=None, reward_key="score", **hooks)
    async with router_of(config):
        async with rollout_of(config) as w:
            await w.restore()
            await w.publish(0)
            await w.batch(0)
            await until(lambda: user_functions.CALLS)
        async with rollout_of(config) as w:
            await w.restore(attempt=2)
            await w.batch(0)
            await until(lambda: len(user_functions.CALLS) == 2)
    before, after = user_functions.CALLS
    assert before == after and [s.reward_details for s in after] == [{"score": 0.5, "acc": 1}] * 8


async def test_a_hook_that_raises_leaves_the_default_values(tmp_path: Path) -> None:
    config = make_config(tmp_path, custom_rollout_log_function_path=f"{HERE}.log_raising")
    async with world(config) as w:
        await w.batch(0)
        await until(lambda: w.telemetry.rows)
        assert w.telemetry.rows[0][2]["rollout/num_samples"].value == 8


async def test_the_evaluation_hook_gets_miles_data(tmp_path: Path) -> None:
    user_functions.CALLS.clear()
    data = write_lines(tmp_path / "eval.jsonl", [{"prompt": "abc", "label": "x"}] * 2)
    config = make_config(
        tmp_path, eval_prompt_data=("s", str(data)), custom_eval_rollout_log_function_path=f"{HERE}.log_eval"
    )
    async with world(config) as w:
        await w.stub.Evaluate(rollout_pb2.EvaluateRequest(rollout_id=4, policy_version=0), timeout=10)
    assert w.telemetry.rows == []  # also after the service waited for its hooks
    [(rollout_id, told, extra)] = user_functions.CALLS
    assert (rollout_id, told["s"]["rewards"], told["s"]["truncated"]) == (4, [0.0, 0.0], [False, False])
    assert extra["eval/s"] == 0.0


async def test_the_evaluation_hook_that_raises_leaves_the_default_values(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "eval.jsonl", [{"prompt": "abc", "label": "x"}] * 2)
    path = f"{HERE}.log_eval_raising"
    config = make_config(tmp_path, eval_prompt_data=("s", str(data)), custom_eval_rollout_log_function_path=path)
    async with world(config) as w:
        await w.stub.Evaluate(rollout_pb2.EvaluateRequest(rollout_id=4, policy_version=0), timeout=10)
        await until(lambda: w.telemetry.rows)
        assert w.telemetry.rows[0][:2] == ("eval/step", 4) and "eval/s" in w.telemetry.rows[0][2]


async def test_an_evaluation_that_is_skipped_says_why_without_the_hook(tmp_path: Path) -> None:
    user_functions.CALLS.clear()
    data = write_lines(tmp_path / "eval.jsonl", [{"prompt": "abc", "label": "x"}] * 2)
    config = make_config(
        tmp_path, eval_prompt_data=("s", str(data)), custom_eval_rollout_log_function_path=f"{HERE}.log_eval"
    )
    async with world(config) as w:
        request = rollout_pb2.EvaluateRequest(rollout_id=4, policy_version=7)  # no engine holds it
        await code_of(w.stub.Evaluate(request, timeout=10))
    assert w.telemetry.rows == [("eval/step", 4, {"eval/skipped_engine_lost": Last(1)}, 1)]
    assert user_functions.CALLS == []


async def test_an_evaluation_that_the_reward_function_stops_says_so(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "eval.jsonl", [{"prompt": "abc", "label": "x"}] * 2)
    config = make_config(tmp_path, eval_prompt_data=("s", str(data)), rm_type=None, custom_rm_path=f"{HERE}.as_dict")
    async with world(config) as w:
        await code_of(w.stub.Evaluate(rollout_pb2.EvaluateRequest(rollout_id=4, policy_version=0), timeout=10))
    assert [row[:3] for row in w.telemetry.rows] == [("eval/step", 4, {"eval/skipped_reward_misconfigured": Last(1)})]


async def test_a_hook_that_changes_its_copies_is_warned_of_and_changes_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path, custom_rollout_log_function_path=f"{HERE}.log_changing")
    with structlog.testing.capture_logs() as logs:
        async with world(config) as w:
            groups, _ = await w.batch(0)
            await until(lambda: w.telemetry.rows)
    values = w.telemetry.rows[0][2]
    assert "mine" not in values and values["rollout/reward/max"].value <= 1.0
    assert all(sample.reward <= 1.0 for group in groups for sample in group.samples)
    (warned,) = [entry for entry in logs if entry["event"] == "log_hook_changed_its_copies"]
    assert warned["hook"] == f"{HERE}.log_changing"


async def test_a_hook_that_only_looks_is_not_warned_of(tmp_path: Path) -> None:
    user_functions.CALLS.clear()
    hooks = hooks_of(tmp_path, "log_looking")
    sample = Sample(0, 0, "p", [1], "r", 1, None, reward=float("nan"), rollout_log_probs=[float("nan")])
    with structlog.testing.capture_logs() as logs:
        await hooks.handled_rollout(3, lambda: [copy.deepcopy(sample)], {"x": float("nan")}, 1.0)
    assert logs == [] and user_functions.CALLS[0][0][0] == "pending"


async def test_a_hook_that_hangs_for_a_minute_delays_no_rollout_and_no_checkpoint(tmp_path: Path) -> None:
    user_functions.RELEASE.clear()
    config = make_config(tmp_path, custom_rollout_log_function_path=f"{HERE}.log_hanging", log_hook_timeout_s=1.0)
    try:
        async with world(config) as w:
            began = time.monotonic()
            await w.batch(0)
            await w.batch(0)
            await w.stub.SaveState(rollout_pb2.SaveStateRequest(rollout_id=0), timeout=10)
            assert time.monotonic() - began < 0.9  # the hook is not over
            await until(lambda: w.telemetry.rows)
            assert time.monotonic() - began < 3.0
            assert w.telemetry.rows[0][2]["rollout/num_samples"].value == 8
    finally:
        user_functions.RELEASE.set()


async def test_reports_go_without_hooks_when_too_many_hang_or_the_service_ends(tmp_path: Path) -> None:
    user_functions.RELEASE.clear()
    telemetry = FakeTelemetry()
    reporter = reporter_of(tmp_path, telemetry, "log_hanging")
    with structlog.testing.capture_logs() as logs:
        for rollout_id in range(MAX_WAITING + 1):
            report(reporter, rollout_id, {"rollout/x": Last(1)})
        assert [row[1] for row in telemetry.rows] == [MAX_WAITING]
        await reporter.finish(0.05)
    user_functions.RELEASE.set()
    assert sorted(row[1] for row in telemetry.rows) == list(range(MAX_WAITING + 1))
    assert all(row[2] == {"rollout/x": Last(1)} for row in telemetry.rows)
    assert {entry["event"] for entry in logs} == {"log_hook_left_out", "log_hook_not_waited_for"}


async def test_what_a_killed_service_did_not_report_the_next_start_does(tmp_path: Path) -> None:
    user_functions.RELEASE.clear()
    killed = FakeTelemetry(attempt=3)
    reporter = reporter_of(tmp_path, killed, "log_hanging")
    values = {"rollout/x": Last(1), "rollout/h": Histogram((0.0, 1.0), (2,)), "rollout/nan": Last(float("nan"))}
    report(reporter, 7, values)
    assert killed.rows == []  # and here it is killed
    telemetry = FakeTelemetry(attempt=4)
    with structlog.testing.capture_logs() as logs:
        again = reporter_of(tmp_path, telemetry, "log_false")
        again.send_left_over(never)
    user_functions.RELEASE.set()
    [(axis, step, sent, attempt)] = telemetry.rows
    assert (axis, step, attempt, telemetry.attempt) == ("rollout/step", 7, 3, 4) and repr(sent) == repr(values)
    assert [entry["event"] for entry in logs] == ["log_hook_cut_short"]
    again.send_left_over(never)
    assert len(telemetry.rows) == 1


@pytest.mark.parametrize("name", ["log_true", "log_false"])
async def test_what_a_hook_decided_is_kept_until_it_is_surely_sent(tmp_path: Path, name: str) -> None:
    first, second = FakeTelemetry(), FakeTelemetry()
    reporter = reporter_of(tmp_path, first, name)
    report(reporter, 7, {"rollout/x": Last(1)})
    await until(lambda: first.rows)
    with structlog.testing.capture_logs() as logs:
        reporter_of(tmp_path, second, name).send_left_over(never)  # as if the first was killed before it was on its way
    assert second.rows == first.rows and logs == []
    report(reporter, 8, {"rollout/x": Last(1)})
    await until(lambda: len(first.rows) == 2)
    await reporter.close()
    assert list((tmp_path / "reports").iterdir()) == []


async def test_a_folder_that_takes_nothing_costs_only_a_warning(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("no folder")
    telemetry = FakeTelemetry()
    reporter = reporter_of(tmp_path, telemetry, "log_false")
    with structlog.testing.capture_logs() as logs:
        reporter.send_left_over(never)
        report(reporter, 7, {"rollout/x": Last(1)})
        await until(lambda: telemetry.rows)
        await reporter.close()
    assert {entry["event"] for entry in logs} == {"report_not_kept"}


def test_flags_have_miles_names_beside_our_own(tmp_path: Path) -> None:
    args = flags_of(make_config(tmp_path))
    assert args.actor_num_gpus_per_node == args.trainer_num_ranks == 1
    assert (args.colocate, args.rollout_seed, args["lr"], vars(args)["lr"]) == (False, args.seed, args.lr, args.lr)
    assert getattr(args, "no_such", 5) == 5 and not hasattr(args, "no_such")
    assert copy.deepcopy(args) is args and pickle.loads(pickle.dumps(args)).lr == args.lr


@pytest.mark.parametrize(
    ("name", "hint"),
    [("rollout_batchsize", "rollout_batch_size"), ("use_wandb_offline", "--wandb-mode"), ("qqq", "furlong config")],
)
def test_a_flag_that_is_not_there_says_what_is_near(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(flags_of(make_config(tmp_path)), name)


def test_flags_cannot_be_changed(tmp_path: Path) -> None:
    args = flags_of(make_config(tmp_path))
    vars(args)["lr"] = 7.0
    for change in (lambda: setattr(args, "lr", 7.0), lambda: delattr(args, "lr"), lambda: setattr(args, "new", 1)):
        with pytest.raises(AttributeError, match="read-only"):
            change()
    assert args.lr != 7.0


MILES_FIELDS = {
    *("group_index", "index", "prompt", "tokens", "multimodal_inputs", "multimodal_train_inputs", "response"),
    *("response_length", "label", "reward", "loss_mask", "weight_versions", "rollout_log_probs", "remove_sample"),
    *("rollout_routed_experts", "status", "metadata", "train_metadata", "generate_function_path", "session_id"),
    *("non_generation_time", "spec_info", "prefix_cache_info"),
}


def test_samples_have_miles_fields_and_methods() -> None:
    proto = sample_pb2.Sample(prompt_token_ids=[1, 2], response_token_ids=[3, 4], reward=1.0, num_cached_tokens=1)
    proto.policy_versions.add(policy_version=7, start=0, end=1)
    proto.policy_versions.add(policy_version=8, start=1, end=2)
    sample = view_sample(proto, prompt=None, group_index=0, group_size=1)
    assert all(hasattr(sample, name) for name in MILES_FIELDS)
    assert (sample.oldest_weight_version, sample.prefix_cache_info.prefix_cache_hit_rate) == (7, 0.5)
    assert (sample.effective_response_length, sample.spec_info.spec_accept_rate) == (2, 0.0)
    assert set(sample.to_dict()) >= MILES_FIELDS and sample.to_dict()["status"] == "pending"
