"""A sample's bits depend on its prompt, parameters and seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.engine.batch import Batch
from services.rollout.engine.linear import MAX_TILE, ROW_STEP, GemmShape, choose_row_tile, safe_tile
from services.rollout.engine.requests import ModelLimits, RequestReader
from services.rollout.engine.sample import Sample
from services.rollout.engine.tokenizer import Tokenizer
from tests.rollout.engine.engine_process import EngineProcess
from tests.rollout.engine.test_engine_forward import load_model
from tests.rollout.engine.tiny_model import EOS_ID, VOCAB_SIZE, make_checkpoint

Trace = tuple[list[int], list[float]]
LIMITS = ModelLimits(
    vocab_size=VOCAB_SIZE,
    context_length=2048,
    max_total_tokens=1 << 20,
    eos_token_ids=frozenset({EOS_ID}),
    random_seed=0,
)


def random_body(rnd: random.Random, seed: int) -> dict[str, Any]:
    params = {
        "sampling_seed": seed,
        "max_new_tokens": rnd.choice([1, 5, 20, 60, 90]),
        "temperature": rnd.choice([0, 0.7, 1.0, 1.3]),
        "top_p": rnd.choice([1.0, 0.9]),
        "top_k": rnd.choice([-1, 5, 50]),
        "min_p": rnd.choice([0, 0.05]),
        "ignore_eos": rnd.random() < 0.5,
        "frequency_penalty": rnd.choice([0, 0, 0.5]),
    }
    length = rnd.choice([1, 3, 20, 63, 64, 65, 130])
    return {"input_ids": [rnd.randrange(256) for _ in range(length)], "sampling_params": params}


def run(batch: Batch, arrivals: Sequence[tuple[int, Sample]]) -> None:
    """Run samples that arrive at given steps, each until it has all its tokens."""
    waiting = sorted(arrivals, key=lambda item: item[0])
    step = 0
    with torch.inference_mode():
        while waiting or batch.running:
            due = [sample for at, sample in waiting if at <= step][: batch.num_free]
            waiting = [item for item in waiting if item[1] not in due]
            moved = batch.prefill(due, 0) if due else []
            moved += batch.step() if batch.running else []
            for sample in list(batch.running):
                if len(sample.output_ids) >= sample.params.max_new_tokens:
                    batch.release(sample)
            step += 1


def trace(sample: Sample) -> Trace:
    count = sample.params.max_new_tokens
    return sample.output_ids[:count], sample.output_logprobs[:count]


@pytest.fixture(scope="module", params=["qwen3", "llama-odd", "bfloat16"])
def batch_and_reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options: dict[str, Any] = {"kind": "qwen3"}
    if request.param == "llama-odd":
        options = {
            "kind": "llama",
            "head_dim": 8,
            "num_attention_heads": 3,
            "hidden_size": 96,
            "num_key_value_heads": 1,
            "vocab_size": 263,
        }
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), **options)
    dtype = torch.bfloat16 if request.param == "bfloat16" else torch.float32
    model = load_model(folder, dtype, num_slots=48)
    return Batch(model, max_running=48), RequestReader(Tokenizer(str(folder)), LIMITS)


def test_any_batch_gives_the_bits_of_running_alone(batch_and_reader: Any) -> None:
    batch, reader = batch_and_reader
    rnd = random.Random(7)
    bodies = [random_body(rnd, seed) for seed in range(24)]
    alone: list[Trace] = []
    for body in bodies:
        (sample,) = reader.read(body).samples
        run(batch, [(0, sample)])
        alone.append(trace(sample))
    for _ in range(4):
        arrivals = [(rnd.randrange(60), at, reader.read(body).samples[0]) for at, body in enumerate(bodies)]
        crowd = [(rnd.randrange(60), reader.read(random_body(rnd, 1000 + at)).samples[0]) for at in range(40)]
        mixed = [(when, sample) for when, _, sample in arrivals] + crowd
        rnd.shuffle(mixed)
        run(batch, mixed)
        for _, at, sample in arrivals:
            assert trace(sample) == alone[at], bodies[at]


def test_copies_of_a_prompt_have_the_bits_of_a_prompt_of_their_own(batch_and_reader: Any) -> None:
    batch, reader = batch_and_reader
    body = {"input_ids": list(range(70)), "sampling_params": {"n": 9, "sampling_seed": 3, "max_new_tokens": 30}}
    samples = reader.read(body).samples
    run(batch, [(0, sample) for sample in samples])
    assert len({tuple(sample.output_ids) for sample in samples}) == 9
    late = reader.read(body).samples
    run(batch, [(5 * at, sample) for at, sample in enumerate(late)])
    assert [trace(sample) for sample in late] == [trace(sample) for sample in samples]


def test_the_row_tile_of_this_cpu_is_proved_with_the_models_shapes() -> None:
    shapes = [GemmShape(64, 128, accumulates=False), GemmShape(128, 64, accumulates=True)]
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_row_tile(shapes, dtype) in (1, ROW_STEP, MAX_TILE)


def test_a_product_that_depends_on_its_row_count_gets_the_small_tile() -> None:
    rows = torch.randn(MAX_TILE, 4)
    generator = torch.Generator().manual_seed(0)
    assert safe_tile(lambda part, _: part + len(part), rows, generator) == ROW_STEP
    assert safe_tile(lambda part, _: part + torch.arange(len(part))[:, None], rows, generator) == 1
    assert safe_tile(lambda part, _: part * 2, rows, generator) == MAX_TILE


def test_small_tiles_give_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    reader = RequestReader(Tokenizer(str(folder)), LIMITS)
    bodies = [random_body(random.Random(at), at) for at in range(12)]
    traces = []
    for tile in (1, ROW_STEP):
        batch = Batch(load_model(folder, num_slots=16), max_running=16)
        batch.model.gemm.tile = tile
        together = [(0, reader.read(body).samples[0]) for body in bodies]
        run(batch, together)
        (last,) = reader.read(bodies[-1]).samples
        run(batch, [(0, last)])
        traces.append(trace(last) == trace(together[-1][1]))
    assert traces == [True, True]


def test_two_processes_give_the_same_bits(engine: EngineProcess, tmp_path: Path, checkpoint: Path) -> None:
    body = {
        "text": ["hello", "a longer prompt than that", "hello"],
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 40, "sampling_seed": 11, "n": 3},
    }
    other = EngineProcess(tmp_path, checkpoint)
    try:
        crowd = [engine.later("/generate", {"text": "x" * at}) for at in range(1, 20)]
        answers = [served.post("/generate", body).json for served in (engine, other)]
        assert all(reply.result().status == 200 for reply in crowd)
    finally:
        assert other.stop() == 0
    ours, theirs = [
        [(item["output_ids"], item["meta_info"]["output_token_logprobs"]) for item in answer] for answer in answers
    ]
    assert ours == theirs
