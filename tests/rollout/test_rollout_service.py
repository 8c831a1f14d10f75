"""NextBatch, evaluation, state and the life of the service, with real sockets, a real router and fake engines."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from furlong.checksum import bytes_checksum
from furlong.config import ConfigError
from furlong.v1 import rollout_pb2, sample_pb2, weights_pb2
from services.rollout.batch_store import MAGIC, BatchStore, KeptBatch, decode_batch, encode_batch
from services.rollout.feed import FeedPosition
from tests.rollout.world import code_of, make_config, rollout_of, router_of, until, world, write_lines


async def test_a_batch_has_all_groups_in_order_and_a_summary(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        groups, summary = await w.batch(0)
        assert [group.group_index for group in groups] == [0, 1, 2, 3]
        assert [[s.index for s in group.samples] for group in groups] == [[0, 1]] * 4
        assert (summary.num_groups, summary.num_samples, summary.reward_count) == (4, 8, 8)
        sample = groups[0].samples[0]
        assert len(sample.response_token_ids) == len(sample.rollout_log_probs) == 5
        assert [(v.policy_version, v.start, v.end) for v in sample.policy_versions] == [(0, 0, 5)]
        assert sample.status == sample_pb2.SAMPLE_STATUS_COMPLETED
        [(axis, step, values, attempt)] = w.telemetry.rows
        assert (axis, step, attempt, values["rollout/num_samples"].value) == ("rollout/step", 0, 1, 8)


async def test_one_request_a_group_with_a_seed_a_sample(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        await w.batch(0)
        bodies = await w.seen(0, "/generate")
        assert len(bodies) == 4
        assert all(len(body["input_ids"]) == 2 and body["return_logprob"] is True for body in bodies)
        seeds = [params["sampling_seed"] for body in bodies for params in body["sampling_params"]]
        assert len(set(seeds)) == 8


async def test_asked_again_it_gives_the_same_samples_without_generating(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        first, _ = await w.batch(0)
        again, summary = await w.batch(0)
        assert again == first
        assert summary.repeated_answer
        assert len(await w.seen(0, "/generate")) == 4
        assert len(w.telemetry.rows) == 1


async def test_a_client_that_hangs_up_loses_nothing_and_a_second_call_joins(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        await w.control(0, delay_s=0.3)
        first = w.stub.NextBatch(rollout_pb2.NextBatchRequest(rollout_id=0, policy_version=0), timeout=10)
        reading = asyncio.ensure_future(first.read())

        async def generating() -> bool:
            return (await w.status()).phase == "generating"

        await until(generating)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        groups, summary = await w.batch(0)
        assert len(groups) == 4
        assert not summary.repeated_answer
        assert len(await w.seen(0, "/generate")) == 4


async def test_other_rollouts_are_out_of_range(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        code, words = await code_of(w.batch(1))
        assert code == grpc.StatusCode.OUT_OF_RANGE
        assert "current one (0)" in words


async def test_a_version_that_no_engine_holds_is_refused(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        code, words = await code_of(w.batch(0, 3))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "policy version 3" in words


async def test_before_restore_nothing_is_given(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with router_of(config), rollout_of(config) as w:
        code, words = await code_of(w.batch(0))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "RestoreState" in words


async def test_a_restarted_service_gives_the_same_samples(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with router_of(config):
        async with rollout_of(config) as w:
            await w.restore()
            await w.publish(0)
            first, _ = await w.batch(0)
        async with rollout_of(config) as w:
            again, summary = await w.batch(0)
            assert again == first
            assert summary.repeated_answer
            await w.publish(1)
            following, _ = await w.batch(1)
            assert [group.group_index for group in following] == [4, 5, 6, 7]


async def test_a_resumed_run_is_the_same_as_an_unbroken_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with world(make_config(tmp_path / "a")) as w:
        whole = []
        for rollout_id in range(3):
            await w.publish(rollout_id)
            whole.append((await w.batch(rollout_id))[0])
    config = make_config(tmp_path / "b")
    async with router_of(config):
        async with rollout_of(config) as w:
            await w.restore()
            await w.publish(0)
            await w.batch(0)
            state = (await w.stub.SaveState(rollout_pb2.SaveStateRequest(rollout_id=0), timeout=5)).state
            await w.publish(1)
            await w.batch(1)
        (w.run_dir.rollout_store / "journal.json").unlink()
        for kept in w.run_dir.rollout_store.glob("batch-*"):
            kept.unlink()
        async with rollout_of(config) as w:
            assert await w.restore(state, 1, 2) == []
            for rollout_id in (1, 2):
                await w.publish(rollout_id)
                assert (await w.batch(rollout_id))[0] == whole[rollout_id]


def test_foreign_files_beside_kept_batches_are_left_alone(tmp_path: Path) -> None:
    for name in ("batch-zzz.pb", "batch-.pb", "batch-00000007.pb"):
        (tmp_path / name).write_bytes(b"x")
    store = BatchStore(tmp_path)
    assert store.ids() == [7] and store.forget(since=0) == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch-.pb", "batch-zzz.pb"]


def test_a_batch_kept_by_a_version_without_details_is_read() -> None:
    at = FeedPosition("data")
    batch = KeptBatch(0, [sample_pb2.Group()], rollout_pb2.BatchSummary(), at, at, "s", "w", 1, {}, details=[[]])
    now = encode_batch(batch)[len(MAGIC) : -16]
    entry = b',"details":"[[]]"'
    assert decode_batch(encode_batch(batch)) == batch and entry in now
    size = int.from_bytes(now[:8], "little") - len(entry)
    older = MAGIC + size.to_bytes(8, "little") + now[8:].replace(entry, b"")
    assert decode_batch(older + bytes.fromhex(bytes_checksum(older))) == replace(batch, details=[])


async def test_a_later_attempt_gets_the_values_of_a_repeated_batch_once(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        await w.batch(0)
        await w.restore(None, 0, 2)
        await w.batch(0)
        await w.batch(0)
        await until(lambda: len(w.telemetry.rows) >= 2)
        assert [(step, attempt) for _, step, _, attempt in w.telemetry.rows] == [(0, 1), (0, 2)]
        assert w.telemetry.rows[0][2] == w.telemetry.rows[1][2]


async def test_after_a_committed_checkpoint_the_batch_is_forgotten(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        await w.batch(0)
        for _ in range(2):
            await w.stub.CommitCheckpoint(rollout_pb2.CommitCheckpointRequest(rollout_id=0), timeout=5)
        assert list(w.run_dir.rollout_store.glob("batch-*")) == []
        assert (await code_of(w.batch(0)))[0] == grpc.StatusCode.OUT_OF_RANGE


async def test_kept_batches_of_other_initial_weights_are_made_anew(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        first, _ = await w.batch(0)
        await w.restore(None, 0, 2)
        begun = await w.begin(0)
        await w.control_all(weights="other weights")
        request = rollout_pb2.ReceiveBucketRequest(update_id=begun.update_id, bucket_index=0)
        await w.stub.ReceiveBucket(request, timeout=5)
        from tests.rollout.world import commit_request

        await w.stub.CommitWeightUpdate(commit_request(begun.update_id, 0, "other digest"), timeout=5)
        again, summary = await w.batch(0)
        assert not summary.repeated_answer
        assert again != first
        assert [g.prompt_index for g in again] == [g.prompt_index for g in first]


async def test_a_changed_data_set_starts_at_its_beginning_with_a_warning(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with router_of(config):
        async with rollout_of(config) as w:
            await w.restore()
            await w.publish(0)
            await w.batch(0)
            state = (await w.stub.SaveState(rollout_pb2.SaveStateRequest(rollout_id=0), timeout=5)).state
        write_lines(Path(config.rollout.prompt_data), [{"prompt": "ccc", "label": "c"}])
        async with rollout_of(config) as w:
            [warning] = await w.restore(state, 1, 2)
            assert "prompts changed" in warning
            await w.publish(1)
            groups, _ = await w.batch(1)
            assert [(g.group_index, g.prompt_index, g.epoch) for g in groups] == [
                (4, 0, 0), (5, 0, 1), (6, 0, 2), (7, 0, 3),
            ]  # fmt: skip


async def test_evaluation_reports_every_set(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "eval.jsonl", [{"prompt": "abc", "label": "x"}] * 3)
    sets = ("one", str(data), "two", str(data))
    config = make_config(tmp_path, eval_prompt_data=sets, n_samples_per_eval_prompt=2)
    async with world(config) as w:
        request = rollout_pb2.EvaluateRequest(rollout_id=-1, policy_version=0)
        answer = await w.stub.Evaluate(request, timeout=20)
        assert [(r.name, r.num_samples, r.reward_count) for r in answer.results] == [("one", 6, 6), ("two", 6, 6)]
        again = await w.stub.Evaluate(request, timeout=20)
        assert again == answer
        [(axis, step, values, _)] = w.telemetry.rows
        assert (axis, step) == ("eval/step", -1)
        assert values["eval/one"].count == 6


async def test_all_samples_failed_is_a_clear_error_and_can_be_asked_again(tmp_path: Path) -> None:
    async with world(make_config(tmp_path)) as w:
        await w.control(0, statuses=[400] * 4)
        code, words = await code_of(w.batch(0))
        assert code == grpc.StatusCode.INTERNAL
        assert "all 8 samples" in words
        assert "HTTP 400" in words
        groups, _ = await w.batch(0)
        assert [group.group_index for group in groups] == [0, 1, 2, 3]


async def test_the_engines_get_no_secret_and_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "SECRET123")
    config = make_config(tmp_path)
    async with router_of(config), rollout_of(config) as w:
        told = w.run_dir.log("engine-0").with_suffix(".out").read_text()
        assert not any(name in told for name in ("WANDB_API_KEY", "HF_TOKEN", "http_proxy", "ALL_PROXY"))
        assert "HF_HUB_OFFLINE" in told
        [engine] = await w.engines()
        assert engine.state == weights_pb2.ENGINE_STATE_WAITING_FOR_WEIGHTS


async def test_a_second_service_in_the_folder_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with world(config) as w:
        with pytest.raises(ConfigError, match="in use by another rollout service"):
            async with rollout_of(config):
                pass
        assert len((await w.batch(0))[0]) == 4
