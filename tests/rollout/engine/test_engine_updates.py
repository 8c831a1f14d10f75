"""Weights come over real gloo; whatever goes wrong leaves an engine that refuses to generate."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from furlong.checksum import tensor_checksum
from tests.rollout.engine.engine_process import REPOSITORY, EngineProcess, Reply
from tests.rollout.engine.tiny_model import make_checkpoint
from tests.rollout.engine.weight_sender import Named, WeightSender, read_tensors


@pytest.fixture
def sender(engine: EngineProcess) -> Iterator[WeightSender]:
    sender = WeightSender(engine.port)
    assert sender.join().status == 200
    yield sender
    engine.post("/destroy_weights_update_group", {"group_name": sender.group})
    sender.leave()


@pytest.fixture(scope="session")
def new_tensors(other_checkpoint: Path) -> Named:
    return read_tensors(other_checkpoint)


@pytest.fixture(scope="session")
def new_output(other_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    engine = EngineProcess(tmp_path_factory.mktemp("reference"), other_checkpoint)
    try:
        return engine.generate()["output_ids"]
    finally:
        assert engine.stop() == 0


def sums(tensors: Named) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in tensors}


def finish(engine: EngineProcess, **body: Any) -> Reply:
    return engine.post("/end_weight_update", body)


def version(engine: EngineProcess) -> str:
    return engine.get("/model_info").json["weight_version"]


def assert_refuses(engine: EngineProcess, words: str) -> None:
    reply = engine.post("/generate", {"text": "hello"})
    assert reply.status == 503
    assert words in reply.json["message"]
    assert "complete weight update" in reply.json["message"]
    assert version(engine) == "unknown"
    assert engine.get("/health").status == engine.get("/ready").status == 503


@pytest.mark.parametrize("form", ["tensors", "buckets"])
def test_a_whole_model_in_several_calls_is_taken_at_the_end(
    engine: EngineProcess, sender: WeightSender, new_tensors: Named, new_output: list[int], form: str
) -> None:
    send = sender.send if form == "tensors" else sender.send_bucket
    assert engine.post("/begin_weight_update", {}).status == 200
    for start in range(0, len(new_tensors), 9):
        assert send(new_tensors[start : start + 9], weight_version="7", flush_cache=False).status == 200
        assert version(engine) == "v0"
    assert finish(engine, checksums=sums(new_tensors), expected_names=[n for n, _ in new_tensors]).status == 200
    answer = engine.generate()
    assert answer["output_ids"] == new_output
    assert answer["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 8}]
    assert version(engine) == "7"


def test_bfloat16_tensors_are_checked_in_the_dtype_they_came_in(
    engine: EngineProcess, sender: WeightSender, new_tensors: Named
) -> None:
    rounded = [(name, tensor.bfloat16()) for name, tensor in new_tensors]
    engine.post("/begin_weight_update", {})
    assert sender.send_bucket(rounded).status == 200
    assert finish(engine, weight_version="8", checksums=sums(rounded)).status == 200
    exact = sums([(name, tensor.float()) for name, tensor in rounded])
    reply = engine.post("/weights_checker", {"action": "checksum"}).json
    assert {name: reply["ranks"][0]["checksums"][name] for name in exact} == exact


def test_a_wrong_checksum_is_named_and_invalidates(
    engine: EngineProcess, sender: WeightSender, new_tensors: Named
) -> None:
    wrong = sums(new_tensors) | {"model.norm.weight": "00"}
    engine.post("/begin_weight_update", {})
    assert sender.send(new_tensors).status == 200
    reply = finish(engine, weight_version="9", checksums=wrong)
    assert reply.status == 400
    assert "Checksums differ" in reply.json["message"]
    assert "model.norm.weight" in reply.json["message"]
    assert_refuses(engine, "Checksums differ")


def test_a_missing_tensor_is_named_and_a_full_update_repairs(
    engine: EngineProcess, sender: WeightSender, new_tensors: Named, new_output: list[int]
) -> None:
    engine.post("/begin_weight_update", {})
    assert sender.send(new_tensors[1:]).status == 200
    reply = finish(engine, weight_version="9", expected_names=[name for name, _ in new_tensors])
    assert reply.status == 400
    assert new_tensors[0][0] in reply.json["message"]
    assert_refuses(engine, "incomplete")
    engine.post("/begin_weight_update", {})
    assert sender.send(new_tensors).status == 200
    assert finish(engine, weight_version="10").status == 200
    assert engine.generate()["output_ids"] == new_output


def test_a_partial_update_does_not_repair(engine: EngineProcess, sender: WeightSender, new_tensors: Named) -> None:
    engine.post("/begin_weight_update", {})
    assert finish(engine, expected_names=["model.norm.weight"]).status == 400
    engine.post("/begin_weight_update", {})
    assert sender.send(new_tensors[:3]).status == 200
    assert finish(engine, weight_version="10").status == 400
    assert_refuses(engine, "incomplete")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.nope.weight", torch.zeros(4), "no such tensor"),
        ("model.norm.weight", torch.zeros(65), "shape must be [64], got [65]"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.float64), "dtypes must be among"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_invalidates(
    engine: EngineProcess, sender: WeightSender, name: str, tensor: torch.Tensor, words: str
) -> None:
    engine.post("/begin_weight_update", {})
    answer = sender.announce([(name, tensor)], weight_version="11")
    if tensor.dtype == torch.float32:
        sender.broadcast(tensor)
    reply = answer.result()
    assert reply.status == 400
    assert words in reply.json["message"]
    assert finish(engine, weight_version="11").status == 400
    assert_refuses(engine, words)


def test_a_sender_killed_in_the_middle_is_an_error_at_once_and_the_next_one_is_welcome(
    engine: EngineProcess, other_checkpoint: Path, new_tensors: Named, new_output: list[int]
) -> None:
    command = [sys.executable, "-m", "tests.rollout.engine.weight_sender", str(engine.port), str(other_checkpoint)]
    started = time.monotonic()
    killed = subprocess.run([*command, "weights"], cwd=REPOSITORY, timeout=60, check=False)
    assert killed.returncode == -9
    deadline = time.monotonic() + 10
    while version(engine) != "unknown":
        assert time.monotonic() < deadline, "the engine still waits for a dead sender"
    assert_refuses(engine, "stopped sending")
    sender = WeightSender(engine.port)
    assert sender.join().status == 200
    assert engine.post("/begin_weight_update", {}).status == 200
    assert sender.send_bucket(new_tensors).status == 200
    assert finish(engine, weight_version="12", checksums=sums(new_tensors)).status == 200
    assert engine.generate()["output_ids"] == new_output
    assert time.monotonic() - started < 40
    engine.post("/destroy_weights_update_group", {"group_name": "weights"})
    sender.leave()


def test_a_sender_that_sends_nothing_times_out(engine: EngineProcess, sender: WeightSender, new_tensors: Named) -> None:
    engine.post("/begin_weight_update", {})
    reply = sender.announce(new_tensors, timeout_s=0.3).result()
    assert reply.status == 400
    assert "0.3 s" in reply.json["message"]
    assert finish(engine, weight_version="13").status == 400
    assert_refuses(engine, "late")


def test_a_trainer_that_never_joins_is_named_in_time(engine: EngineProcess) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "timeout_s": 0.3}
    started = time.monotonic()
    reply = engine.post("/init_weights_update_group", body)
    assert reply.status == 400
    assert "rank 0 (the trainer) did not open its store at 127.0.0.1:1" in reply.json["message"]
    assert time.monotonic() - started < 3


def test_an_open_session_blocks_a_second_unless_forced(
    engine: EngineProcess, sender: WeightSender, new_tensors: Named
) -> None:
    assert engine.post("/begin_weight_update", {}).status == 200
    assert "already open" in engine.post("/begin_weight_update", {}).json["message"]
    assert engine.post("/begin_weight_update", {"force": True}).status == 200
    assert engine.get("/model_info").json["weights_valid"]  # nothing was written
    assert sender.send(new_tensors[:1]).status == 200
    assert engine.post("/begin_weight_update", {"force": True}).status == 200
    assert_refuses(engine, "replaced")
    assert finish(engine).status == 400
    assert_refuses(engine, "incomplete")


def test_giving_an_update_up_keeps_weights_that_it_did_not_touch(
    engine: EngineProcess, sender: WeightSender, new_tensors: Named
) -> None:
    assert finish(engine, abort=True).status == 400
    engine.post("/begin_weight_update", {})
    assert finish(engine, abort=True).status == 200
    assert version(engine) == "v0"
    engine.post("/begin_weight_update", {})
    assert sender.send(new_tensors[:1]).status == 200
    assert finish(engine, abort=True).status == 200
    assert_refuses(engine, "gave the update up")


def test_a_stale_group_is_replaced(engine: EngineProcess, sender: WeightSender, new_tensors: Named) -> None:
    successor = WeightSender(engine.port, sender.group)
    sender.leave()
    assert successor.join().status == 200
    engine.post("/begin_weight_update", {})
    assert successor.send(new_tensors).status == 200
    assert finish(engine, weight_version="16").status == 200
    sender.handle = successor.handle


def test_weights_that_are_not_numbers_end_samples_and_leave_nothing_behind(
    engine: EngineProcess, sender: WeightSender, new_tensors: Named, new_output: list[int]
) -> None:
    broken = [(name, torch.full_like(tensor, torch.nan)) for name, tensor in new_tensors]
    engine.post("/begin_weight_update", {})
    assert sender.send(broken, flush_cache=False).status == 200
    assert finish(engine, weight_version="17").status == 200
    for fields in ({}, {"params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}):
        answer = engine.generate("a longer prompt", **fields)
    answer = engine.generate("a longer prompt")
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert "not a number" in answer["meta_info"]["finish_reason"]["message"]
    engine.post("/begin_weight_update", {})
    assert sender.send(new_tensors, flush_cache=False).status == 200
    assert finish(engine, weight_version="18").status == 200
    assert engine.generate()["output_ids"] == new_output


def test_requests_wait_while_a_session_is_open(engine: EngineProcess) -> None:
    engine.post("/begin_weight_update", {})
    waiting = engine.later("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}})
    assert engine.post("/update_weight_version", {"new_version": "x", "abort_all_requests": False}).status == 200
    assert not waiting.done()
    assert finish(engine).status == 200
    assert waiting.result(10).status == 200


def test_requests_that_wait_when_an_update_fails_are_told(engine: EngineProcess) -> None:
    engine.post("/begin_weight_update", {})
    waiting = engine.later("/generate", {"text": "hello"})
    while engine.get("/v1/loads").json["loads"][0]["num_waiting_reqs"] == 0:
        pass
    assert finish(engine, expected_names=["model.norm.weight"]).status == 400
    reply = waiting.result(10)
    assert reply.status == 503
    assert "model.norm.weight did not arrive" in reply.json["message"]


@pytest.mark.parametrize("flush", [False, True])
def test_a_sample_in_flight_over_an_update_tells_its_versions(
    engine: EngineProcess, other_checkpoint: Path, flush: bool
) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.005})
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}, "return_logprob": True}
    running = engine.later("/generate", body)
    engine.await_running(1)
    engine.post("/pause_generation", {"mode": "in_place"})
    disk = {"model_path": str(other_checkpoint), "weight_version": "14", "flush_cache": flush}
    assert engine.post("/update_weights_from_disk", disk).status == 200
    engine.post("/continue_generation", {})
    info = running.result(20).json["meta_info"]
    spans = info["weight_versions"]
    assert [span["version"] for span in spans] == ["v0", "14"]
    assert spans[0]["end"] == spans[1]["start"] > 0
    assert spans[1]["end"] == info["completion_tokens"] == info["output_token_logprobs_length"] == 60
    assert info["num_retractions"] == int(flush)


def test_begin_waits_for_running_samples_within_its_limit(engine: EngineProcess) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.01})
    running = engine.later("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}})
    engine.await_running(1)
    reply = engine.post("/begin_weight_update", {"timeout_s": 0.05})
    assert reply.status == 400
    assert "pause_generation" in reply.json["message"]
    assert engine.post("/begin_weight_update", {}).status == 200
    assert running.result(1).json["meta_info"]["completion_tokens"] == 50
    assert finish(engine).status == 200


def test_a_folder_that_does_not_fit_changes_nothing(engine: EngineProcess, tmp_path: Path) -> None:
    before = engine.generate()["output_ids"]
    larger = make_checkpoint(tmp_path, hidden_size=96)
    for path, words in ((larger, "does not fit"), (tmp_path / "absent", "Failed to get weights iterator")):
        reply = engine.post("/update_weights_from_disk", {"model_path": str(path), "weight_version": "15"})
        assert reply.status == 400
        assert words in reply.json["message"]
    assert version(engine) == "v0"
    assert engine.generate()["output_ids"] == before


@pytest.mark.parametrize("with_head", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tied_weights_and_an_engine_that_starts_empty(tmp_path: Path, with_head: bool) -> None:
    folder = make_checkpoint(tmp_path / "tied", kind="llama", tie_word_embeddings=True)
    tensors = [(name, tensor) for name, tensor in read_tensors(folder) if name != "lm_head.weight"]
    if with_head:
        tensors.append(("lm_head.weight", dict(tensors)["model.embed_tokens.weight"]))
    engine = EngineProcess(tmp_path / "engine", folder, "--skip-weights")
    try:
        assert engine.get("/ping").status == 200
        assert "no weights" in engine.post("/generate", {"text": "a"}).json["message"]
        sender = WeightSender(engine.port, "tied")
        sender.join()
        engine.post("/begin_weight_update", {})
        assert sender.send(tensors).status == 200
        names = [name for name, _ in tensors] + ["lm_head.weight"]
        assert finish(engine, weight_version="1", expected_names=names, checksums=sums(tensors)).status == 200
        got = engine.generate()["output_ids"]
        sender.leave()
        engine.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "1"})
        assert engine.generate()["output_ids"] == got
        rows = engine.post("/get_weights_by_name", {"name": "lm_head.weight", "truncate_size": 2}).json
        assert torch.tensor(rows).equal(dict(tensors)["model.embed_tokens.weight"][:2])
    finally:
        assert engine.stop() == 0
