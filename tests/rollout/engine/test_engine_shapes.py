"""Answers have the keys and types that SGLang's have, recorded from a real server."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.rollout.engine.conftest import captures
from tests.rollout.engine.engine_process import EngineProcess, Reply

GENERATE, OPENAI, ERRORS, CONTROL = (captures(name) for name in ("generate", "openai", "errors", "control"))
OPTIONAL = {"decode_throughput"}  # absent from one-token answers


def call(engine: EngineProcess, capture: dict[str, Any]) -> Reply:
    request = capture["request"]
    if isinstance(request, dict) and "raw" in request:
        kind = "text" if "text/plain" in request["headers"]["content-type"] else "json"
        return engine.call(capture["method"], capture["path"], raw=request["raw"].encode(), kind=kind)
    return engine.call(capture["method"], capture["path"], request)


def assert_same_shape(ours: Any, theirs: Any, where: str = "body") -> None:
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), where
        if "top_logprobs[" in where and "logprob" not in theirs:  # keyed by token text
            assert len(ours) == len(theirs), where
            return
        assert ours.keys() ^ theirs.keys() <= OPTIONAL, (where, ours.keys() ^ theirs.keys())
        for key in theirs:
            if key in ours:
                assert_same_shape(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list):
        assert isinstance(ours, list), where
        assert bool(ours) == bool(theirs), (where, ours)
        for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            assert_same_shape(mine, other, f"{where}[{at}]")
    elif not where.endswith((".matched", "cached_tokens_details", ".matched_stop")):
        assert kind(ours) == kind(theirs), (where, ours, theirs)


def kind(value: Any) -> type:
    return float if type(value) is int else type(value)


@pytest.mark.parametrize("name", GENERATE)
def test_generate_answers_have_sglangs_shape(engine: EngineProcess, name: str) -> None:
    capture = GENERATE[name]
    reply = call(engine, capture)
    assert reply.status == capture["status"]
    theirs, ours = capture["response"], reply.json
    for answer in theirs if isinstance(theirs, list) else [theirs]:
        details = answer["meta_info"]
        details["cached_tokens_details"] = details["finish_reason"] = None
    for answer in ours if isinstance(ours, list) else [ours]:
        assert answer["meta_info"]["finish_reason"]["type"] in ("length", "stop")
        answer["meta_info"]["finish_reason"] = None
        assert math.isfinite(answer["meta_info"]["e2e_latency"])
    assert_same_shape(ours, theirs)


@pytest.mark.parametrize("name", OPENAI)
def test_openai_answers_have_sglangs_shape(engine: EngineProcess, name: str) -> None:
    capture = OPENAI[name]
    for choice in capture["response"]["choices"]:
        choice.get("meta_info", {}).pop("cached_tokens_details", None)
    reply = call(engine, capture)
    assert reply.status == capture["status"], reply.text
    ours = reply.json
    for choice in ours["choices"]:
        choice.get("meta_info", {}).pop("cached_tokens_details", None)
    assert_same_shape(ours, capture["response"])


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_sglangs_status_shape_and_semantic_words(engine: EngineProcess, name: str) -> None:
    capture = ERRORS[name]
    reply = call(engine, capture)
    assert reply.status == capture["status"], reply.text
    assert_same_shape(reply.json, capture["response"])
    if "validation error" not in str(capture["response"]):
        assert reply.json == capture["response"]


@pytest.mark.parametrize("name", CONTROL)
def test_control_answers_are_sglangs(engine: EngineProcess, name: str) -> None:
    capture = CONTROL[name]
    reply = call(engine, capture)
    assert reply.status == capture["status"], reply.text
    theirs = capture["response"]
    if isinstance(theirs, str):
        assert reply.text == theirs
    else:
        assert_same_shape(reply.json, theirs)
    if name == "begin_weight_update":
        assert engine.post("/end_weight_update", {}).status == 200
