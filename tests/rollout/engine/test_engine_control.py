"""Abort, the three pauses, the cache."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future
from typing import Any

import pytest

from tests.rollout.engine.engine_process import EngineProcess, Reply

COUNT = 60
PARAMS = {"max_new_tokens": COUNT, "ignore_eos": True}
BODY: dict[str, Any] = {"text": "hello", "return_logprob": True, "sampling_params": PARAMS}
SEEDED = BODY | {"sampling_params": PARAMS | {"sampling_seed": 3}}


def start(engine: EngineProcess, body: dict[str, Any] = BODY, count: int = 1) -> Future[Reply]:
    engine.post("/slow_down", {"forward_sleep_time": 0.01})
    reply = engine.later("/generate", body)
    engine.await_running(count)
    return reply


def assert_aborted(reply: Reply) -> None:
    assert reply.status == 200
    info = reply.json["meta_info"]
    assert info["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert len(reply.json["output_ids"]) == info["completion_tokens"] == info["output_token_logprobs_length"] < COUNT


def test_abort_by_rid_answers_with_what_there_is_and_spares_others(engine: EngineProcess) -> None:
    victim = start(engine, BODY | {"rid": "victim"})
    other = start(engine, BODY | {"rid": "victim-2"}, count=2)
    assert engine.post("/abort_request", {"rid": "victim"}).status == 200
    assert_aborted(victim.result(2))
    assert other.result(10).json["meta_info"]["completion_tokens"] == COUNT


def test_abort_all_also_ends_what_waits(engine: EngineProcess) -> None:
    replies = [start(engine)]
    engine.post("/pause_generation", {"mode": "in_place"})
    replies.append(engine.later("/generate", BODY))
    while engine.get("/v1/loads").json["loads"][0]["num_waiting_reqs"] == 0:
        pass
    engine.post("/abort_request", {"abort_all": True})
    for reply in replies:
        assert_aborted(reply.result(2))


def test_a_pause_by_abort_ends_what_runs_and_holds_what_comes(engine: EngineProcess) -> None:
    running = start(engine)
    assert engine.post("/pause_generation", {}).status == 200
    assert_aborted(running.result(2))
    assert engine.get("/ready").status == 503
    assert engine.get("/health").status == 200
    later = engine.later("/generate", BODY)
    assert engine.post("/flush_cache", None).status == 200
    assert not later.done()
    engine.post("/continue_generation", {})
    assert later.result(10).json["meta_info"]["completion_tokens"] == COUNT


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
def test_a_pause_in_the_middle_changes_no_bit(engine: EngineProcess, mode: str, retractions: int) -> None:
    whole = engine.post("/generate", SEEDED).json
    running = start(engine, SEEDED)
    engine.post("/pause_generation", {"mode": mode})
    time_of_pause = engine.get("/v1/loads").json["loads"][0]
    assert time_of_pause["num_running_reqs"] == 1 - retractions
    assert engine.post("/flush_cache", None).status == (200 if retractions else 400)
    engine.post("/continue_generation", {})
    paused = running.result(10).json
    assert paused["output_ids"] == whole["output_ids"]
    assert paused["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    assert paused["meta_info"]["num_retractions"] == retractions


def test_flush_waits_for_idle_within_its_limit(engine: EngineProcess) -> None:
    running = start(engine)
    started = time.monotonic()
    reply = engine.post("/flush_cache?timeout=0.1", None)
    assert (reply.status, reply.text) == (400, "Timed out waiting for idle state.")
    assert time.monotonic() - started < 2
    assert engine.post("/flush_cache?timeout=20", None).status == 200
    assert running.result(1).status == 200


def test_update_weight_version_aborts_unless_told_not_to(engine: EngineProcess) -> None:
    running = start(engine)
    engine.post("/update_weight_version", {"new_version": "v1", "abort_all_requests": False})
    engine.post("/slow_down", {"forward_sleep_time": None})
    spans = running.result(10).json["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["v0", "v1"]
    victim = start(engine)
    engine.post("/update_weight_version", {"new_version": "v2"})
    assert_aborted(victim.result(2))


def test_clients_that_leave_before_their_call_had_its_turn_do_no_harm(engine: EngineProcess) -> None:
    running = start(engine)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", engine.port)) as client:
            client.sendall(b"POST /flush_cache?timeout=0 HTTP/1.1\r\nhost: e\r\ncontent-length: 0\r\n\r\n")
            time.sleep(0.002)
    assert running.result(10).json["meta_info"]["completion_tokens"] == COUNT
