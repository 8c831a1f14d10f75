"""What a client of /generate and the OpenAI endpoints can count on."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from tests.rollout.engine.engine_process import EngineProcess


def test_input_logprobs_are_raw_and_output_logprobs_follow_the_temperature(engine: EngineProcess) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0}
    warm = engine.generate("hello", params={"temperature": 0.5, "sampling_seed": 1, "max_new_tokens": 1}, **fields)
    cold = engine.generate("hello", **fields)
    assert warm["meta_info"]["input_token_logprobs"] == cold["meta_info"]["input_token_logprobs"]
    scored = engine.post(
        "/generate",
        {
            "input_ids": [71, 68, 75, 75, 78, *cold["output_ids"]],
            "sampling_params": {"max_new_tokens": 0},
            "logprob_start_len": 4,
            **fields,
            "return_logprob": True,
        },
    ).json["meta_info"]["input_token_logprobs"]
    generated = cold["meta_info"]["output_token_logprobs"]
    for (again, token, _), (first, chosen, _) in zip(scored[-8:], generated, strict=True):
        assert token == chosen
        assert again == pytest.approx(first, abs=1e-4)


def test_n_samples_differ_and_sample_zero_is_the_single_one(engine: EngineProcess) -> None:
    params = {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 12}
    many = engine.generate("hello", params=params | {"n": 4})
    assert many[0]["output_ids"] == engine.generate("hello", params=params)["output_ids"]
    assert len({tuple(item["output_ids"]) for item in many}) == 4
    assert [item["meta_info"]["cached_tokens"] for item in many] == [0, 4, 4, 4]


def test_each_item_of_a_batch_has_its_own_parameters_and_rid(engine: EngineProcess) -> None:
    params = [{"max_new_tokens": 2}, {"max_new_tokens": 3, "n": 2}]
    reply = engine.post("/generate", {"text": ["a", "b"], "sampling_params": params, "rid": "r"}).json
    assert [item["meta_info"]["completion_tokens"] for item in reply] == [2, 3, 3]
    assert [item["meta_info"]["id"] for item in reply] == ["r_0", "r_1", "r_2"]


def test_a_stop_string_ends_the_sample_and_is_cut(engine: EngineProcess) -> None:
    text = engine.generate(params={"max_new_tokens": 30, "ignore_eos": True})["text"]
    stop = next(text[at] for at in range(1, len(text)) if text[at].isascii() and text[at] not in text[:at])
    cut = engine.generate(params={"max_new_tokens": 30, "stop": [stop]})
    kept = engine.generate(params={"max_new_tokens": 30, "stop": stop, "no_stop_trim": True})
    assert cut["text"] + stop == kept["text"] == text[: text.index(stop) + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_stop_tokens_min_new_tokens_and_logit_bias(engine: EngineProcess) -> None:
    ended = engine.generate(params={"logit_bias": {"65": 100}, "stop_token_ids": [65]})
    assert ended["output_ids"] == [65]
    assert ended["text"] == ""
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 65}
    held = engine.generate(params={"logit_bias": {"65": 100}, "stop_token_ids": [65], "min_new_tokens": 3})
    assert 65 not in held["output_ids"][:3]
    assert held["output_ids"][3] == 65


def test_ignore_eos_ignores_stop_tokens_too_but_not_min_new_tokens(engine: EngineProcess) -> None:
    """As SGLang 0.5.23 answers the same requests."""
    params = {"logit_bias": {"65": 100}, "stop_token_ids": [65], "ignore_eos": True, "max_new_tokens": 5}
    assert engine.generate(params=params)["output_ids"] == [65] * 5
    held = engine.generate(params=params | {"min_new_tokens": 3})
    assert 65 not in held["output_ids"][:3]
    assert held["output_ids"][3:] == [65, 65]
    assert held["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-9}])
def test_the_narrowest_choice_is_greedy(engine: EngineProcess, params: dict[str, Any]) -> None:
    warm = engine.generate(params={"temperature": 1.0, "max_new_tokens": 20} | params)
    assert warm["output_ids"] == engine.generate(params={"max_new_tokens": 20})["output_ids"]


def test_a_stream_is_cumulative_and_ends_as_the_whole_answer(engine: EngineProcess) -> None:
    body: dict[str, Any] = {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
    whole = engine.post("/generate", body | {"return_logprob": True}).json
    events = engine.post("/generate", body | {"stream": True, "return_logprob": True}).events
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(set(counts))
    assert counts[-1] == 20
    for event, count in zip(events, counts, strict=True):
        assert event["output_ids"] == whole["output_ids"][:count]
        assert event["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:count]
        assert whole["text"].startswith(event["text"])
    assert events[-1]["text"] == whole["text"]
    assert events[0]["meta_info"]["finish_reason"] is None
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_a_batch_stream_tells_whose_chunk_it_is(engine: EngineProcess) -> None:
    body = {"text": ["a", "bc"], "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    last = {event["index"]: event for event in engine.post("/generate", body).events}
    whole = engine.post("/generate", body | {"stream": False}).json
    assert [last[at]["output_ids"] for at in (0, 1)] == [item["output_ids"] for item in whole]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_streams_add_up_to_the_whole_answer(engine: EngineProcess, path: str) -> None:
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "m", "max_tokens": 12, "temperature": 0} | prompt
    whole = engine.post(path, body).json
    events = engine.post(path, body | {"stream": True, "stream_options": {"include_usage": True}}).events
    choices = [event["choices"][0] for event in events if event["choices"]]
    text = "".join(item["delta"].get("content", "") if "delta" in item else item["text"] for item in choices)
    first = whole["choices"][0]
    assert text == (first["message"]["content"] if "message" in first else first["text"])
    assert choices[-1]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [1, 260]}, "in [0, 259], the model's vocabulary; got 260 at position 1"),
        ({"input_ids": [-1]}, "got -1 at position 0"),
        ({"input_ids": [[1], [300]]}, "got 300"),
        ({"text": ""}, "no tokens"),
        ({"input_ids": [[1], []]}, "cannot be empty"),
        ({"text": "a", "sampling_params": {"logit_bias": {"999": 1}}}, "logit_bias"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "top_p"),
        ({"text": "a", "sampling_params": {"n": 0}}, "n must be at least 1"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "regex is not supported"),
        ({"text": "a", "sampling_params": {"stop_regex": "("}}, "stop_regex"),
        ({"text": ["a"], "sampling_params": [{}, {}]}, "one entry a prompt"),
        ({"input_ids": [1] * 2048}, "The input (2048 tokens) is longer"),
        ({"input_ids": [1] * 2000, "sampling_params": {"max_new_tokens": 49}}, "total of 2049 tokens"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_says_why(engine: EngineProcess, body: dict[str, Any], words: str) -> None:
    reply = engine.post("/generate", body)
    assert reply.status == 400
    assert words in reply.json["error"]["message"]
    assert engine.post("/generate", {"text": "still here"}).status == 200


def test_unknown_methods_and_paths(engine: EngineProcess) -> None:
    assert engine.get("/generate").status == 405
    assert engine.get("/generate").json == {"detail": "Method Not Allowed"}
    assert engine.post("/start_profile", {}).status == 404
    assert engine.get("/v1/models/absent").status == 404


def test_metrics_count_what_was_generated(engine: EngineProcess) -> None:
    def generated() -> float:
        lines = engine.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("sglang:generation_tokens_total{")]
        return float(line.split()[-1])

    before = generated()
    engine.generate(params={"max_new_tokens": 9, "ignore_eos": True})
    assert generated() - before == 9


def test_a_client_that_leaves_frees_its_slot(engine: EngineProcess) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.01})
    for stream in (b"false", b"true"):
        body = b'{"text": "x", "stream": %s, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": true}}' % stream
        head = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        with socket.create_connection(("127.0.0.1", engine.port)) as client:
            client.sendall(head % len(body) + body)
            engine.await_running(1)
        engine.await_running(0, timeout_s=2)


def test_more_samples_than_slots_all_end(engine: EngineProcess) -> None:
    replies = [
        engine.later("/generate", {"text": "x" * (at % 50 + 1), "sampling_params": {"n": 3}}) for at in range(60)
    ]
    assert [reply.result(30).status for reply in replies] == [200] * 60
    assert engine.running() == 0
    assert threading.active_count() < 200
