"""The lines that SGLang really prints become numbers, of this and of older versions."""

from pathlib import Path

import pytest

from furlong.records import Mean, Sum
from services.metrics.engines.sglang_lines import read_line

RECORDED = Path(__file__).with_name("sglang_0_5_23.log")
"""What an engine printed, from its start over three requests of three prompts to its end."""
MEANS = {
    "num_running_reqs": 3.0,
    "num_used_tokens": 49.0,
    "token_usage": 0.0,
    "graph_share": 0.0,
    "gen_throughput": 63.14,
    "num_queue_reqs": 0.0,
}


def means(text: str) -> dict[str, float]:
    reading = read_line(text)
    assert reading is not None
    return {name: value.sum / value.count for name, value in reading.values.items() if isinstance(value, Mean)}


def sums(text: str) -> dict[str, float]:
    reading = read_line(text)
    assert reading is not None
    return {name: float(value.value) for name, value in reading.values.items() if isinstance(value, Sum)}


def test_recorded_output_adds_up_to_what_was_asked_for() -> None:
    readings = [reading for line in RECORDED.read_text().splitlines() if (reading := read_line(line))]
    total = dict.fromkeys(("new_seqs", "new_tokens", "cached_tokens", "num_decode_batches"), 0.0)
    for reading in readings:
        for name, value in reading.values.items():
            if isinstance(value, Sum) and name in total:
                total[name] += float(value.value)
    assert total == {"new_seqs": 9.0, "new_tokens": 37.0, "cached_tokens": 56.0, "num_decode_batches": 23.0}
    assert total["new_tokens"] + total["cached_tokens"] == 3 * 31  # the three prompts have 31 tokens


def test_decode_line() -> None:
    text = (
        "[2026-11-29 22:30:58] Decode batch, #running-req: 3, #token: 49, token usage: 0.00, cpu graph: False, "
        "gen throughput (token/s): 63.14, #queue-req: 0"
    )
    assert means(text) == MEANS
    assert sums(text) == {"num_decode_batches": 1.0}


def test_prefill_line() -> None:
    text = (
        "[2026-11-29 22:30:58] Prefill batch, #new-seq: 2, #new-token: 30, #cached-token: 10, token usage: 0.12, "
        "#running-req: 4, #queue-req: 5, #pending-token: 6, cuda graph: True, input throughput (token/s): 109.82"
    )
    assert sums(text) == {"num_prefill_batches": 1.0, "new_seqs": 2.0, "new_tokens": 30.0, "cached_tokens": 10.0}
    assert means(text) == {
        "token_usage": 0.12,
        "num_queue_reqs": 5.0,
        "num_pending_tokens": 6.0,
        "graph_share": 1.0,
        "input_throughput": 109.82,
        "cache_hit_rate": 0.25,
    }


OLD_DECODE = (
    "[2025-02-11 10:00:00 TP0] Decode batch. #running-req: 1, #token: 40, token usage: 0.01, "
    "gen throughput (token/s): 3.20, largest-len: 0, #queue-req: 5, "
)
OLD_PREFILL = (
    "[2024-10-01 10:00:00] Prefill batch. #new-seq: 1, #new-token: 5, #cached-token: 0, "
    "cache hit rate: 12.5%, token usage: 0.00, #running-req: 0, #queue-req: 7"
)
SPECULATIVE = (
    "[2026-11-29 22:30:58.123 DP0 TP0] Decode batch [412], #running-req: 3, #full token: 49, "
    "full token usage: 0.10, #swa token: 5, swa token usage: 0.20, accept len: 2.50, accept rate: 0.50, "
    "cuda graph: True, gen throughput (token/s): 63.14, #queue-req: 0"
)
DISAGGREGATED = (
    "[2026-11-29 22:30:58] Decode batch, #running-req: 3, #token: 9, token usage: 0.5, pre-allocated usage: 0.02, "
    "#prealloc-req: 2, #transfer-req: 4, #retracted-req: 1, cuda graph: True, gen throughput (token/s): 5.00, "
    "#queue-req: 0, est. decode TFLOPS/s (per GPU): 1.00"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OLD_DECODE, {"gen_throughput": 3.2, "num_queue_reqs": 5.0, "token_usage": 0.01}),
        (OLD_PREFILL, {"num_queue_reqs": 7.0, "cache_hit_rate": 0.0}),
        (SPECULATIVE, {"spec_accept_length": 2.5, "spec_accept_rate": 0.5, "full_token_usage": 0.1}),
        (DISAGGREGATED, {"num_decode_prealloc_queue_reqs": 2.0, "num_decode_transfer_queue_reqs": 4.0}),
    ],
)
def test_other_versions_and_modes(text: str, expected: dict[str, float]) -> None:
    assert expected.items() <= means(text).items()


@pytest.mark.parametrize(
    ("ranks", "rank"),
    [("", ""), (" TP0", ""), (" DP0 TP0", ""), (" DP1 TP0", "dp1"), (" DP2 TP1 EP1", "dp2-tp1-ep1"), (" TP10", "tp10")],
)
def test_rank_of_the_scheduler_is_told(ranks: str, rank: str) -> None:
    reading = read_line(f"[2026-11-29 22:30:58{ranks}] Decode batch, #running-req: 3, #queue-req: 0")
    assert reading is not None
    assert reading.rank == rank


@pytest.mark.parametrize(
    "text", ["", "Decode batch", "Prefill batch, of cookies", "a batch of 3", "Decode batch, #unknown: 4"]
)
def test_other_lines_are_none(text: str) -> None:
    assert read_line(text) is None
