"""Rewards: built-in ones, and users' functions with everything that can be wrong with them."""

import asyncio
import json
import math
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy
import pytest
import structlog.testing

from furlong.config import ConfigError
from furlong.process import ExitCode
from furlong.v1 import sample_pb2
from services.rollout import call_pool
from services.rollout.call_pool import CallPool, CallTimeout
from services.rollout.flags import flags_of
from services.rollout.generation import fail
from services.rollout.metrics import category_values
from services.rollout.rewards import Reward, RewardFunction, RewardMisconfigured, built_in_reward
from services.rollout.sample_view import Sample
from services.rollout.user_values import as_json
from tests.rollout import user_functions
from tests.rollout.world import make_config, world

HERE = "tests.rollout.user_functions"


def sample(response: str = "5", label: object = "5", **fields: int) -> Sample:
    values = {"index": 0, "group_index": 0, "response_length": 3, **fields}
    return Sample(prompt="p", tokens=[1, 2], response=response, label=label, **values)  # type: ignore[arg-type]


def reward_function(tmp_path: Path, name: str, **rollout: Any) -> RewardFunction:
    config = make_config(tmp_path, rm_type=None, custom_rm_path=f"{HERE}.{name}", **rollout)
    return RewardFunction(config, flags_of(config))


@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    [
        ("the answer is 41", "41", 1.0),
        ("41 or 42", "41", 0.0),
        ("1,234.50", "1234.5", 1.0),
        ("12-7=5", "5", 1.0),
        ("3-5", "5", 1.0),
        ("it is -5", "-5", 1.0),
        ("it is -5", "5", 0.0),
        ("none", "5", 0.0),
        ("", "", 0.0),
        ("5.", "5", 1.0),
    ],
)
def test_last_number_compares_numbers(response: str, label: str, wanted: float) -> None:
    assert built_in_reward("last_number", response, label) == wanted


def test_exact_match_ignores_space_around() -> None:
    assert built_in_reward("exact_match", " ab\n", "ab") == 1.0
    assert built_in_reward("exact_match", "a b", "ab") == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length", 3.0),
        ("in_async", 2.0),
        ("partial", 1.5),
        ("async_partial", 2.0),
        ("scorer", 3.0),
        ("from_numpy", 0.25),
    ],
)
async def test_sync_async_partial_and_callable_objects_give_their_number(
    tmp_path: Path, name: str, value: float
) -> None:
    assert await reward_function(tmp_path, name).score(sample()) == Reward(value)


async def test_an_error_names_the_line_that_raised_it(tmp_path: Path) -> None:
    reward = await reward_function(tmp_path, "raising").score(sample())
    line = user_functions.raising.__code__.co_firstlineno + 1
    assert f"tests/rollout/user_functions.py:{line})" in reward.error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raising", "raised KeyError: 'no such thing'"),
        ("stopping", "StopIteration"),
        ("exiting", "SystemExit(3)"),
        ("not_a_number", "gave nan"),
        ("text", "must give a number, got str '1.0'"),
        ("slow_always", "took longer than 0.2 s"),
        ("slow_async", "took longer than 0.2 s"),
    ],
)
async def test_whatever_goes_wrong_is_told_and_ends_in_time(tmp_path: Path, name: str, words: str) -> None:
    started = time.monotonic()
    reward = await reward_function(tmp_path, name, rm_timeout_s=0.2).score(sample())
    assert reward.value is None
    assert words in reward.error
    assert f"{HERE}.{name}" in reward.error
    assert time.monotonic() - started < 0.9


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("evil", "raised RuntimeError: no float"),
        ("evil_in_list", "must give a number, got list [unprintable: RuntimeError]"),
        ("evil_error", "raised _EvilError: [its message raised RuntimeError]"),
        ("too_big_for_a_float", "raised OverflowError"),
        ("lone_surrogate", "raised ValueError: cannot parse '?'"),
        ("endless_message", "more characters]"),
    ],
)
async def test_values_that_fail_when_looked_at_fail_their_sample_only(tmp_path: Path, name: str, words: str) -> None:
    reward = await reward_function(tmp_path, name).score(sample())
    assert reward.value is None and words in reward.error and len(reward.error) < 1500
    fail(sample_pb2.Sample(), reward.error)  # a message can hold it


async def test_details_that_json_cannot_hold_are_told_as_text(tmp_path: Path) -> None:
    reward = await reward_function(tmp_path, "dict_with_a_lock", reward_key="score").score(sample())
    assert reward.value == 0.5 and reward.details is not None
    assert reward.details["lock"].startswith("<unlocked")
    assert "rollout/error_cat/[unprintable _Evil: RuntimeError]" in category_values([reward.details], key="category")


def test_details_keep_what_json_can_hold() -> None:
    given = {"acc": 1, "ok": True, "nan": math.nan, "none": None, "steps": [0.5, {"text": "\ud800"}], "long": 10**5000}
    kept = json.loads(json.dumps(as_json(given)))
    assert repr(kept) == repr({**given, "long": "[unprintable int: ValueError]"})
    arrays = {"a": numpy.array([1, 2]), "f": numpy.float32(0.5), "i": numpy.int64(3), "t": (1, 2)}
    assert as_json(arrays) == {"a": [1, 2], "f": 0.5, "i": 3, "t": [1, 2]}
    endless: list[object] = []
    endless.append(endless)
    assert str(as_json(endless)).count("[[...]]") == 1


async def test_a_dict_needs_a_key_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(RewardMisconfigured, match=r"'score', 'acc'. Give --reward-key"):
        await reward_function(tmp_path, "as_dict").score(sample())
    with pytest.raises(RewardMisconfigured, match="without the key 'nope'"):
        await reward_function(tmp_path, "as_dict", reward_key="nope").score(sample())
    reward = await reward_function(tmp_path, "as_dict", reward_key="acc").score(sample())
    assert (reward.value, reward.details) == (1.0, {"score": 0.5, "acc": 1})


async def test_a_hanging_call_delays_no_other(tmp_path: Path) -> None:
    function = reward_function(tmp_path, "slow_for_one", rm_timeout_s=5.0, rm_num_workers=2)
    started = time.monotonic()
    slow = asyncio.ensure_future(function.score(sample(sample_index=1)))
    others = await asyncio.gather(*(function.score(sample(sample_index=2)) for _ in range(50)))
    assert time.monotonic() - started < 1.0
    assert all(reward.value == 1.0 for reward in others)
    assert not slow.done()
    assert (await slow).value == 1.0


async def test_abandoned_threads_are_replaced() -> None:
    pool = CallPool(1, name="test")
    hanging = [pool.call(lambda: time.sleep(0.6), timeout_s=0.05) for _ in range(3)]
    results = await asyncio.gather(*hanging, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["CallTimeout"] * 3
    assert await pool.call(lambda: 7, timeout_s=0.5) == 7
    pool.close()


async def test_a_call_given_up_while_a_thread_takes_it_costs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, taking, go_on = CallPool(1, name="taking"), threading.Event(), threading.Event()
    current_thread = threading.current_thread

    def held_up() -> threading.Thread:
        if current_thread().name == "taking-1" and not taking.is_set():
            taking.set()
            go_on.wait(10.0)
        return current_thread()

    monkeypatch.setattr(threading, "current_thread", held_up)
    call = asyncio.create_task(pool.call(lambda: 1, timeout_s=5.0))
    assert await asyncio.to_thread(taking.wait, 10.0)
    call.cancel()
    threading.Timer(0.1, go_on.set).start()
    await asyncio.wait({call})
    assert await asyncio.wait_for(pool.call(lambda: 7, timeout_s=5.0), 5.0) == 7
    pool.close()


async def test_a_call_that_gets_no_thread_ends_and_the_next_one_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, work = CallPool(1, name="test"), CallPool._work
    monkeypatch.setattr(call_pool, "START_SLACK_S", 0.1)
    monkeypatch.setattr(CallPool, "_work", lambda self: None)  # as when there is no file descriptor left for its loop
    with pytest.raises(CallTimeout, match="got no thread"):
        await asyncio.wait_for(pool.call(lambda: 7, timeout_s=0.05), 5.0)
    monkeypatch.setattr(CallPool, "_work", work)
    assert await asyncio.wait_for(pool.call(lambda: 7, timeout_s=5.0), 5.0) == 7
    pool.close()


async def test_a_call_given_up_as_it_starts_is_given_up() -> None:
    pool, go_on = CallPool(1, name="test"), threading.Event()
    call = asyncio.create_task(pool.call(lambda: go_on.wait(10.0), timeout_s=10.0))
    asyncio.get_running_loop().call_soon(lambda: time.sleep(0.1))  # the thread has taken it when the loop looks again
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(call.cancel)
    done, _ = await asyncio.wait({call}, timeout=5.0)
    go_on.set()
    assert done and call.cancelled()
    pool.close()


async def test_a_forked_copy_ends_with_its_call() -> None:
    """It would go on with the calls that wait, and fork at each of them: a copy of a copy of a copy."""
    pool = CallPool(1, name="test")
    pids = await asyncio.gather(*(pool.call(os.fork, timeout_s=10.0) for _ in range(3)))
    ends = [await asyncio.to_thread(os.waitpid, pid, 0) for pid in pids]
    assert [os.waitstatus_to_exitcode(status) for _, status in ends] == [ExitCode.CRASHED] * 3
    pool.close()


@pytest.mark.parametrize("path", ["tests.rollout.no_such.fn", "tests.rollout.user_functions.no_such", "plain"])
def test_a_bad_path_is_refused_at_start(tmp_path: Path, path: str) -> None:
    config = make_config(tmp_path, rm_type=None, custom_rm_path=path)
    with pytest.raises(ConfigError, match=r"rollout\.custom_rm_path"):
        RewardFunction(config, flags_of(config))


async def test_a_function_sees_miles_names_and_changes_nothing(tmp_path: Path) -> None:
    user_functions.CALLS.clear()
    config = make_config(tmp_path, rm_type=None, custom_rm_path=f"{HERE}.looks_at_everything")
    async with world(config) as w:
        groups, _ = await w.batch(0)
    assert all(len(s.prompt_token_ids) == 3 and s.reward == 1.0 for g in groups for s in g.samples)
    args, seen = user_functions.CALLS[0]
    assert (args.rollout_batch_size, args.n_samples_per_prompt) == (4, 2)
    with pytest.raises(AttributeError, match="read-only"):
        args.rollout_batch_size = 8
    assert seen.status is Sample.Status.COMPLETED
    assert len(seen.rollout_log_probs) == seen.response_length == 5
    assert seen.weight_versions == ["0"]
    assert seen.label in "cdefghijkl"


async def test_lost_samples_are_told_with_their_reasons_and_incomplete_groups(tmp_path: Path) -> None:
    config = make_config(tmp_path, rm_type=None, custom_rm_path=f"{HERE}.raising_for_one")
    with structlog.testing.capture_logs() as logs:
        async with world(config) as w:
            await w.batch(0)
    (told,) = [entry for entry in logs if entry["event"] == "samples_lost"]
    assert (told["num_lost"], told["num_samples"], told["num_incomplete_groups"], told["num_groups"]) == (1, 8, 1, 4)
    assert re.fullmatch(
        r"1 x reward function .*raising_for_one raised KeyError: 'no such thing' \(.*\)", *told["reasons"]
    )


async def test_a_dict_without_key_ends_the_rollout_at_once(tmp_path: Path) -> None:
    from tests.rollout.world import code_of

    config = make_config(tmp_path, rm_type=None, custom_rm_path=f"{HERE}.as_dict")
    async with world(config) as w:
        code, words = await code_of(w.batch(0))
        assert code == grpc.StatusCode.INTERNAL  # which the trainer does not try again
        assert "'score', 'acc'" in words
        assert "--reward-key" in words
