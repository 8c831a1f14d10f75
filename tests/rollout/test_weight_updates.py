"""Weight updates against two fake engines: what can go wrong at each step, and that it leaves engines out."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator
from typing import cast

import grpc
import pytest
import pytest_asyncio

from furlong.v1 import rollout_pb2, weights_pb2
from services.rollout import fleet
from services.rollout.engine_http import EngineHttp
from services.rollout.participants import Participant
from services.rollout.refusal import Refused
from services.rollout.weight_plan import UpdatePlan, check_begin, check_bucket
from tests.rollout.world import World, begin_request, code_of, commit_request, make_config, until, world

READY = weights_pb2.ENGINE_STATE_READY
WAITING = weights_pb2.ENGINE_STATE_WAITING_FOR_WEIGHTS
QUICK_S = 0.6


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World]:
    config = make_config(tmp_path_factory.mktemp("two"), rollout_num_engines=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "RESTART_WINDOW_S", 0.5)  # these tests end more engines than a run would bear
        async with world(config) as w:
            yield w


@pytest_asyncio.fixture(loop_scope="module")
async def two(shared: World) -> AsyncGenerator[World]:
    """Two engines that behave, at version 0; whatever a test did to them is undone."""

    async def answering() -> bool:
        gone = (weights_pb2.ENGINE_STATE_GONE, weights_pb2.ENGINE_STATE_STARTING)
        return all(state not in gone for state, _ in await states(shared))

    await until(answering)
    await shared.control_all(broken={}, session=False, seen=[])
    await shared.restore()
    await shared.publish(0)
    yield shared


async def states(w: World) -> list[tuple[int, int | None]]:
    return [(e.state, e.policy_version if e.HasField("policy_version") else None) for e in await w.engines()]


async def receive(w: World, update_id: str, index: int = 0) -> rollout_pb2.ReceiveBucketResponse:
    request = rollout_pb2.ReceiveBucketRequest(update_id=update_id, bucket_index=index)
    return await w.stub.ReceiveBucket(request, timeout=20)


async def join(w: World, update_id: str) -> rollout_pb2.JoinWeightGroupResponse:
    return await w.stub.JoinWeightGroup(rollout_pb2.JoinWeightGroupRequest(update_id=update_id), timeout=20)


async def test_a_whole_update_makes_all_engines_ready_and_reuses_the_group(two: World) -> None:
    first = await two.begin(1)
    assert (first.world_size, first.group_is_new) == (3, False)
    assert [e.state for e in await two.engines()] == [weights_pb2.ENGINE_STATE_UPDATING] * 2
    assert (await two.status()).phase == "updating_weights"
    committed = await two.publish(1)
    assert committed.verification == "sampled"
    assert [(e.engine_id, e.policy_version, e.group_rank) for e in committed.engines] == [
        ("engine-0", 1, 1),
        ("engine-1", 1, 2),
    ]


async def test_another_trainer_makes_a_new_group_and_the_old_one_is_left(two: World) -> None:
    await two.publish(0, trainer_incarnation="one more")
    old = (await two.seen(0, "/init_weights_update_group"))[-1]["group_name"]
    begun = await two.begin(0, trainer_incarnation="two")
    assert begun.group_is_new
    assert begun.group_name != old
    assert (await two.seen(1, "/destroy_weights_update_group"))[-1]["group_name"] == old


async def test_versions_never_go_back_but_may_be_published_again(two: World) -> None:
    await two.publish(3)
    code, words = await code_of(two.begin(2))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "must not go back: 3" in words
    await two.publish(3, trainer_incarnation="other")
    await two.restore(None, 0, 2)
    await two.publish(0)


async def test_a_bucket_that_fails_leaves_every_engine_out_until_a_later_update(two: World) -> None:
    begun = await two.begin(1)
    await two.control(1, broken={"/update_weights_from_distributed": 400})
    code, words = await code_of(receive(two, begun.update_id))
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "engine-1: update_weights_from_distributed failed: HTTP 400" in words
    assert await states(two) == [(WAITING, None)] * 2
    commit = two.stub.CommitWeightUpdate(commit_request(begun.update_id, 1), timeout=5)
    assert (await code_of(commit))[0] == grpc.StatusCode.ABORTED
    assert (await code_of(two.batch(0)))[0] == grpc.StatusCode.FAILED_PRECONDITION
    await two.control(1, broken={})
    await two.publish(1)
    assert await states(two) == [(READY, 1)] * 2


@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update"])
async def test_an_engine_that_is_silent_at_the_start_is_left_out_in_time(two: World, path: str) -> None:
    await two.control(0, broken={path: "hang"})
    started = time.monotonic()
    begun = await two.begin(1, timeout_s=QUICK_S)
    assert time.monotonic() - started < 3 * QUICK_S
    assert [e.engine_id for e in begun.engines] == ["engine-1"]
    assert begun.group_is_new


@pytest.mark.parametrize("path", ["/end_weight_update", "/weights_checker", "/continue_generation"])
async def test_an_engine_that_is_silent_at_the_end_is_left_out_in_time(two: World, path: str) -> None:
    begun = await two.begin(1, timeout_s=QUICK_S)
    await two.control_all(weights="weights 1")
    await receive(two, begun.update_id)
    await two.control(0, broken={path: "hang"})
    started = time.monotonic()
    answer = await two.stub.CommitWeightUpdate(commit_request(begun.update_id, 1), timeout=20)
    assert time.monotonic() - started < 3 * QUICK_S
    assert [e.engine_id for e in answer.engines] == ["engine-1"]


async def test_an_engine_that_is_silent_while_receiving_fails_the_update_in_time(two: World) -> None:
    begun = await two.begin(1, timeout_s=QUICK_S)
    await two.control(0, broken={"/update_weights_from_distributed": "hang"})
    started = time.monotonic()
    code, words = await code_of(receive(two, begun.update_id))
    assert time.monotonic() - started < 3 * QUICK_S
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "engine-0" in words


async def test_an_engine_that_dies_while_receiving_fails_the_update_at_once(two: World) -> None:
    begun = await two.begin(1, timeout_s=20.0)
    await two.control_all(broken={"/update_weights_from_distributed": "hang"})
    call = asyncio.ensure_future(receive(two, begun.update_id))
    await until(lambda: _asked(two, "/update_weights_from_distributed", 2))
    started = time.monotonic()
    os.kill((await two.engines())[0].pid, signal.SIGKILL)
    code, words = await code_of(call)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "engine-0: " in words
    assert time.monotonic() - started < 5


async def _asked(w: World, path: str, count: int) -> bool:
    return sum([len(await w.seen(i, path)) for i in range(2)]) >= count


async def test_an_engine_with_other_bytes_stays_out_and_the_call_says_so(two: World) -> None:
    begun = await two.begin(1)
    await two.control(1, weights="weights 1")  # engine-0 keeps the bytes of version 0
    await receive(two, begun.update_id)
    commit = two.stub.CommitWeightUpdate(commit_request(begun.update_id, 1), timeout=5)
    code, words = await code_of(commit)
    assert code == grpc.StatusCode.DATA_LOSS
    assert "engine-0: verify failed" in words
    assert await states(two) == [(WAITING, None), (READY, 1)]


async def test_a_trainer_that_goes_quiet_ends_the_update(two: World) -> None:
    begun = await two.begin(1, timeout_s=QUICK_S)
    started = time.monotonic()

    async def given_up() -> bool:
        return await states(two) == [(WAITING, None)] * 2

    await until(given_up)
    assert QUICK_S * 0.5 < time.monotonic() - started < 3 * QUICK_S
    code, words = await code_of(receive(two, begun.update_id))
    assert code == grpc.StatusCode.ABORTED
    assert "quiet" in words


async def test_a_trainer_that_hangs_up_in_the_middle_ends_the_update(two: World) -> None:
    begun = await two.begin(1, timeout_s=20.0)
    await two.control_all(broken={"/update_weights_from_distributed": "hang"})
    call = two.stub.ReceiveBucket(rollout_pb2.ReceiveBucketRequest(update_id=begun.update_id), timeout=20)
    waiting = asyncio.ensure_future(code_of(call))
    await until(lambda: _asked(two, "/update_weights_from_distributed", 2))
    call.cancel()
    await asyncio.wait({waiting})

    async def given_up() -> bool:
        return await states(two) == [(WAITING, None)] * 2

    await until(given_up)


async def test_abort_leaves_the_engines_out_and_can_be_repeated(two: World) -> None:
    begun = await two.begin(1)
    for _ in range(2):
        request = rollout_pb2.AbortWeightUpdateRequest(update_id=begun.update_id, reason="test")
        await two.stub.AbortWeightUpdate(request, timeout=5)
    assert await states(two) == [(WAITING, None)] * 2


async def test_a_newer_begin_aborts_the_older(two: World) -> None:
    old = await two.begin(1)
    new = await two.begin(1)
    assert (await code_of(receive(two, old.update_id)))[0] == grpc.StatusCode.ABORTED
    assert new.group_is_new


async def test_calls_out_of_order_are_refused_at_once(two: World) -> None:
    begun = await two.begin(1, trainer_incarnation="two")
    code, words = await code_of(receive(two, begun.update_id))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "JoinWeightGroup" in words
    await join(two, begun.update_id)
    assert (await code_of(join(two, begun.update_id)))[0] == grpc.StatusCode.FAILED_PRECONDITION
    commit = two.stub.CommitWeightUpdate(commit_request(begun.update_id, 1), timeout=5)
    assert "0 of 1 buckets" in (await code_of(commit))[1]
    assert "must be 0 of 1" in (await code_of(receive(two, begun.update_id, 1)))[1]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"buckets": []}, "buckets"),
        ({"mode": weights_pb2.TRANSFER_MODE_UNSPECIFIED}, "mode"),
        ({"backend": "mpi"}, "backend"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"master_port": 0}, "master"),
        ({"buckets": [weights_pb2.Bucket(index=1, tensors=begin_request(0).buckets[0].tensors)]}, "index"),
        ({"buckets": [weights_pb2.Bucket(index=0)]}, "tensors"),
    ],
)
async def test_a_begin_that_makes_no_sense_is_refused_and_changes_nothing(changes: dict, key: str) -> None:
    with pytest.raises(Refused, match=key) as caught:
        check_begin(begin_request(1, **changes), newest_version=0)
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT


async def test_commit_needs_the_version_and_a_checksum_of_every_tensor(two: World) -> None:
    begun = await two.begin(1)
    await receive(two, begun.update_id)
    for request in (
        commit_request(begun.update_id, 2),
        rollout_pb2.CommitWeightUpdateRequest(update_id=begun.update_id, policy_version=1),
    ):
        code, _ = await code_of(two.stub.CommitWeightUpdate(request, timeout=5))
        assert code == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_newer_begin_ends_a_call_of_the_older_that_still_waits(two: World) -> None:
    old = await two.begin(1, timeout_s=20.0)
    await two.control_all(broken={"/update_weights_from_distributed": "hang"})
    waiting = asyncio.ensure_future(code_of(receive(two, old.update_id)))
    await until(lambda: _asked(two, "/update_weights_from_distributed", 2))
    await two.begin(1)
    code, words = await waiting
    assert code == grpc.StatusCode.ABORTED
    assert "a newer update was begun" in words


async def test_a_bucket_is_received_once(two: World) -> None:
    begun = await two.begin(1)
    await receive(two, begun.update_id)
    assert (await code_of(receive(two, begun.update_id)))[0] == grpc.StatusCode.FAILED_PRECONDITION
    plan = UpdatePlan("id", begin_request(1), group_is_new=False, num_received=1)
    plan.request.buckets.append(weights_pb2.Bucket(index=1))
    with pytest.raises(Refused, match="must be 1 of 2"):
        check_bucket(plan, 0)


async def test_a_restarted_engine_is_not_the_one_that_took_part() -> None:
    engine = fleet.Engine("engine-0", 0, incarnation=1, state=fleet.UPDATING)
    participant = Participant(engine, 1, 1, cast(EngineHttp, None))
    assert participant.is_same
    engine.incarnation, engine.state = 2, fleet.WAITING
    assert not participant.is_same
    engine.incarnation, engine.state = 1, fleet.GONE
    assert not participant.is_same
