"""Requests and answers: what is taken, refused, retried, asked for again; against a fake engine in this process."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from furlong.v1 import sample_pb2
from services.rollout.generation import Answer, Ask, Generator
from services.rollout.metrics import Incidents
from services.rollout.receipt import BadAnswer, read_answer
from services.rollout.retries import RetryPolicy
from tests.rollout.fake_engine import VOCABULARY, FakeEngine
from tests.rollout.world import until

COMPLETED, TRUNCATED = sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED
FAILED, ABORTED = sample_pb2.SAMPLE_STATUS_FAILED, sample_pb2.SAMPLE_STATUS_ABORTED


@dataclass
class Place:
    """Where the engine is, in the router's place."""

    http: str

    async def wait_back(self, timeout_s: float) -> None:
        return None

    async def check_engines(self) -> None:
        return None


@dataclass
class Setup:
    engine: FakeEngine
    generator: Generator

    async def generate(self, num_samples: int = 3, **changes: object) -> Answer:
        fields = {
            "name": "train-0-g0",
            "prompt_token_ids": [1, 2],
            "num_samples": num_samples,
            "sampling_params": {"max_new_tokens": 8},
            "policy_version": 4,
            "seed": lambda index, retry: 100 * retry + index,
            **changes,
        }
        return await self.generator.generate(Ask(**fields))  # type: ignore[arg-type]


@pytest.fixture
async def setup() -> AsyncGenerator[Setup]:
    engine = FakeEngine()
    engine.version = "4"
    runner = web.AppRunner(engine.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    place = Place(f"http://127.0.0.1:{runner.addresses[0][1]}")
    async with aiohttp.ClientSession() as session:
        policy = RetryPolicy(max_attempts=3, first_delay_s=0.01, max_delay_s=0.02)
        yield Setup(engine, Generator(session, place, VOCABULARY, 1.0, lambda ids: f"decoded {len(ids)}", policy))
    await runner.cleanup()


async def test_ids_and_log_probs_are_the_engines_own(setup: Setup) -> None:
    answer = await setup.generate(2)
    bodies = setup.engine.seen[0]["body"]
    assert bodies["input_ids"] == [[1, 2], [1, 2]]
    assert [params["sampling_seed"] for params in bodies["sampling_params"]] == [0, 1]
    told = setup.engine.sample({"sampling_seed": 1, "max_new_tokens": 8})
    assert list(answer.samples[1].response_token_ids) == told["output_ids"]
    assert answer.samples[1].rollout_log_probs == pytest.approx(
        [e[0] for e in told["meta_info"]["output_token_logprobs"]]
    )
    assert answer.samples[1].num_cached_tokens == 1


async def test_the_status_is_the_engines_finish_reason(setup: Setup) -> None:
    setup.engine.finish = ["length", "ok", "ok"]
    statuses = [sample.status for sample in (await setup.generate()).samples]
    assert statuses == [TRUNCATED, COMPLETED, COMPLETED]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("nan", "not finite"), ("oov", "not in the vocabulary of 16"), ("short", "5 tokens but 4 log-probs")],
)
async def test_an_answer_that_does_not_fit_fails_its_sample_only(setup: Setup, kind: str, words: str) -> None:
    setup.engine.finish = ["ok", kind, "ok"]
    answer = await setup.generate()
    assert [sample.status for sample in answer.samples] == [COMPLETED, FAILED, COMPLETED]
    assert words in answer.samples[1].error
    assert not answer.samples[1].response_token_ids
    assert setup.engine.num_generated == 3


async def test_another_policy_version_is_refused(setup: Setup) -> None:
    setup.engine.version = "3"
    answer = await setup.generate(1)
    assert answer.samples[0].status == FAILED
    assert "written by policy version '3', not 4" in answer.samples[0].error


async def test_an_aborted_sample_starts_again_from_the_prompt(setup: Setup) -> None:
    setup.engine.finish = ["ok", "abort", "ok", "abort", "ok"]
    answer = await setup.generate()
    assert [sample.status for sample in answer.samples] == [COMPLETED] * 3
    assert answer.incidents == Incidents(num_aborted=2)
    requests = [item["body"] for item in setup.engine.seen]
    assert [len(body["input_ids"]) for body in requests] == [3, 1, 1]
    assert all(ids == [1, 2] for body in requests for ids in body["input_ids"])
    assert [body["sampling_params"][0]["sampling_seed"] for body in requests[1:]] == [1, 1]
    assert len({body["rid"] for body in requests}) == 3


async def test_an_empty_sample_is_asked_for_again_with_another_seed(setup: Setup) -> None:
    setup.engine.finish = ["empty", "ok", "ok", "ok"]
    answer = await setup.generate()
    assert [len(sample.response_token_ids) for sample in answer.samples] == [5, 5, 5]
    assert answer.incidents == Incidents(num_empty=1)
    assert setup.engine.seen[1]["body"]["sampling_params"][0]["sampling_seed"] == 100


async def test_a_sample_that_stays_empty_or_aborted_is_given_up(setup: Setup) -> None:
    setup.engine.finish = ["empty"] * 4
    answer = await setup.generate(1)
    assert (answer.samples[0].status, answer.incidents) == (FAILED, Incidents(num_empty=4))
    setup.engine.finish = ["abort"] * 4
    answer = await setup.generate(1)
    assert (answer.samples[0].status, answer.incidents) == (ABORTED, Incidents(num_aborted=3))


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_what_is_refused_for_good_is_asked_once(setup: Setup, status: int) -> None:
    setup.engine.statuses = [status] * 9
    answer = await setup.generate()
    assert [sample.status for sample in answer.samples] == [FAILED] * 3
    assert f"HTTP {status}" in answer.samples[0].error
    assert len(setup.engine.seen) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
async def test_what_may_pass_is_tried_again_with_the_same_seeds(setup: Setup, status: int) -> None:
    setup.engine.statuses = [status] * 2
    answer = await setup.generate()
    assert [sample.status for sample in answer.samples] == [COMPLETED] * 3
    seeds = [[p["sampling_seed"] for p in item["body"]["sampling_params"]] for item in setup.engine.seen]
    assert seeds == [[0, 1, 2]] * 3


async def test_retries_end(setup: Setup) -> None:
    setup.engine.statuses = [500] * 9
    answer = await setup.generate()
    assert "attempt 3" in answer.samples[0].error
    assert len(setup.engine.seen) == 3


async def test_a_silent_engine_fails_the_samples_in_time(setup: Setup) -> None:
    setup.engine.delay_s = 60
    setup.generator.timeout_s = 0.2
    started = time.monotonic()
    answer = await setup.generate()
    assert time.monotonic() - started < 1
    assert "no answer within 0.2 s (--rollout-request-timeout-s)" in answer.samples[0].error


async def test_a_router_that_is_away_is_waited_for(setup: Setup) -> None:
    there = setup.generator.router
    away = Place("http://127.0.0.1:9")

    async def back(timeout_s: float) -> None:
        away.http = there.http

    away.wait_back = back  # type: ignore[method-assign]
    setup.generator.router = away
    assert [sample.status for sample in (await setup.generate()).samples] == [COMPLETED] * 3


async def test_an_answer_that_breaks_off_is_no_answer(setup: Setup) -> None:
    there = setup.generator.router.http

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        setup.generator.router = Place(there)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n[]\r\n"
        )
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        setup.generator.router = Place(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        answer = await setup.generate()
    assert [sample.status for sample in answer.samples] == [COMPLETED] * 3 and len(setup.engine.seen) == 1


async def test_one_slow_prompt_delays_no_other(setup: Setup) -> None:
    setup.engine.delay_s = 0.3
    slow = asyncio.ensure_future(setup.generate())
    await until(lambda: setup.engine.seen)
    setup.engine.delay_s = 0.0
    await setup.generate()
    assert not slow.done()
    await slow


def answer_of(**changes: object) -> dict[str, object]:
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.0, 3, None], [-2.0, 4, None]],
        "weight_version": "4",
        **changes,
    }
    return {"output_ids": [3, 4], "text": "x", "meta_info": meta}


def read(answer: object) -> sample_pb2.Sample:
    return read_answer(answer, index=0, prompt_token_ids=[1], policy_version=4, vocab_size=16)


def test_without_spans_the_one_version_counts_for_all_tokens() -> None:
    [span] = read(answer_of()).policy_versions
    assert (span.policy_version, span.start, span.end) == (4, 0, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_versions": [{"version": "4", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "4", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "4", "start": 0, "end": 3}]},
        {"weight_versions": "4"},
        {"weight_version": None},
        {"finish_reason": None},
        {"finish_reason": {"type": "exploded"}},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[-1.0, 3], [-2.0, 5]]},
        {"output_token_logprobs": [[-1.0, 3], [float("inf"), 4]]},
        {"output_token_logprobs": [[-1.0, 3], "x"]},
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadAnswer):
        read(answer_of(**changes))


@pytest.mark.parametrize("ids", [[3], [3, 4, 5], [3, "4"], [3, -1], [3, 16], [3, True], None])
def test_ids_that_are_not_tokens_are_refused(ids: object) -> None:
    with pytest.raises(BadAnswer):
        read({**answer_of(), "output_ids": ids})


def test_delays_grow_and_honour_retry_after() -> None:
    policy = RetryPolicy(max_attempts=3, first_delay_s=1.0, max_delay_s=1.5)
    assert 0.7 < (policy.delay_s(1, status=None) or 0) < 1.3
    assert (policy.delay_s(1, status=503, retry_after="4") or 0) == 4.0
    assert (policy.delay_s(1, status=503, retry_after="3600") or 0) <= 10.0
    assert policy.delay_s(3, status=503) is None
    assert policy.delay_s(1, status=400) is None
