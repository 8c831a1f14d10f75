"""Rollout with the CPU engine and real weights over gloo: what is served is what was sent."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch

from furlong import addresses
from furlong.v1 import rollout_pb2, weights_pb2
from tests.rollout.engine.tiny_model import make_checkpoint
from tests.rollout.trainer_side import TrainerSide, weights_of
from tests.rollout.world import World, code_of, make_config, rollout_of, router_of, until, write_lines

pytestmark = pytest.mark.asyncio(loop_scope="module")
READY = weights_pb2.ENGINE_STATE_READY


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World]:
    root = tmp_path_factory.mktemp("real")
    model = make_checkpoint(root / "checkpoint", seed=1)
    config = make_config(root, rollout_engine="cpu", rollout_num_engines=2, rollout_max_response_len=12)
    write_lines(Path(config.rollout.prompt_data), [{"prompt": f"{i}+{i}=", "label": str(i)} for i in range(9)])
    config = config.model_copy(update={"model": config.model.model_copy(update={"hf_checkpoint": str(model)})})
    async with router_of(config), rollout_of(config) as w:
        yield w


@pytest_asyncio.fixture(loop_scope="module")
async def trainer(real: World, request: pytest.FixtureRequest) -> AsyncGenerator[TrainerSide]:
    entry = addresses.find(real.run_dir, "rollout")
    assert entry is not None
    assert entry.grpc is not None
    side = TrainerSide(entry.grpc, incarnation=request.node.name)
    await real.restore()
    for kept in real.run_dir.rollout_store.glob("batch-*"):
        kept.unlink()
    await real.restore()
    yield side
    side.close()


def base(w: World) -> dict[str, torch.Tensor]:
    return weights_of(Path(w.config.model.hf_checkpoint))


async def test_published_weights_are_served_and_scored_as_the_model_does(real: World, trainer: TrainerSide) -> None:
    from transformers import AutoModelForCausalLM

    weights = weights_of(Path(real.config.model.hf_checkpoint), noise=0.05)
    committed = await asyncio.to_thread(trainer.publish, weights, 0)
    assert committed.verification == "checksum"
    assert [(e.state, e.policy_version, e.group_rank) for e in committed.engines] == [(READY, 0, 1), (READY, 0, 2)]
    groups, _ = await real.batch(0)
    model = AutoModelForCausalLM.from_pretrained(real.config.model.hf_checkpoint, dtype=torch.float32)
    model.load_state_dict(weights)
    sample = groups[0].samples[0]
    prompt, response = list(sample.prompt_token_ids), list(sample.response_token_ids)
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits, -1)[range(len(response)), response]
    assert sample.rollout_log_probs == pytest.approx(wanted.tolist(), abs=1e-4)


async def test_two_updates_over_one_group_and_the_same_run_twice(real: World, trainer: TrainerSide) -> None:
    runs = []
    for attempt in (1, 2):
        for kept in real.run_dir.rollout_store.glob("batch-*"):
            kept.unlink()
        await real.restore(None, 0, attempt)
        run = []
        for version in range(2):
            weights = weights_of(Path(real.config.model.hf_checkpoint), noise=0.01 * version)
            begun = await asyncio.to_thread(trainer.begin, weights, version)
            assert begun.group_is_new == (attempt == 1 and version == 0)
            for index in range(2):
                await asyncio.to_thread(trainer.send, weights, begun.update_id, index)
            await asyncio.to_thread(trainer.commit, weights, begun.update_id, version)
            groups, _ = await real.batch(version)
            run.append([[(list(s.response_token_ids), list(s.rollout_log_probs)) for s in g.samples] for g in groups])
        runs.append(run)
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


async def test_other_bytes_than_the_digests_say_are_refused(real: World, trainer: TrainerSide) -> None:
    weights = base(real)
    begun = await asyncio.to_thread(trainer.begin, weights, 1)
    for index in range(2):
        await asyncio.to_thread(trainer.send, weights, begun.update_id, index)
    wrong = {**weights, "model.norm.weight": weights["model.norm.weight"] + 1}
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(trainer.commit, wrong, begun.update_id, 1)
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS  # type: ignore[attr-defined]
    assert "model.norm.weight" in caught.value.details()  # type: ignore[attr-defined]
    assert (await code_of(real.batch(0, 1)))[0] == grpc.StatusCode.FAILED_PRECONDITION
    await asyncio.to_thread(trainer.publish, weights, 1)
    assert [engine.state for engine in await real.engines()] == [READY, READY]


async def test_an_update_left_half_way_keeps_the_engines_out_and_the_next_trainer_gets_them(
    real: World, trainer: TrainerSide
) -> None:
    weights = base(real)
    begun = await asyncio.to_thread(trainer.begin, weights, 1)
    await asyncio.to_thread(trainer.send, weights, begun.update_id, 0)
    entry = addresses.find(real.run_dir, "rollout")
    assert entry is not None
    assert entry.grpc is not None
    second = TrainerSide(entry.grpc, incarnation="the next")
    assert (await code_of(real.batch(0, 0)))[0] == grpc.StatusCode.FAILED_PRECONDITION
    committed = await asyncio.to_thread(second.publish, weights, 1)
    assert len(committed.engines) == 2
    groups, _ = await real.batch(0, 1)
    assert len(groups) == 4
    second.close()


async def test_a_killed_engine_is_in_the_next_update(real: World, trainer: TrainerSide) -> None:
    weights = base(real)
    await asyncio.to_thread(trainer.publish, weights, 0)
    before = (await real.engines())[1]
    os.kill(before.pid, signal.SIGKILL)

    async def is_back() -> bool:
        now = (await real.engines())[1]
        return now.state == weights_pb2.ENGINE_STATE_WAITING_FOR_WEIGHTS and now.pid != before.pid

    await until(is_back, limit_s=30)
    groups, _ = await real.batch(0)
    assert len(groups) == 4
    committed = await asyncio.to_thread(trainer.publish, weights, 1)
    assert [engine.engine_id for engine in committed.engines] == ["engine-0", "engine-1"]
    request = rollout_pb2.NextBatchRequest(rollout_id=1, policy_version=1)
    assert len([part async for part in real.stub.NextBatch(request, timeout=20)]) == 5
