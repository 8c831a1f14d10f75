"""Prometheus text of many engines as one, read back by the official parser."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.router.control.exposition import join

A, B = "http://a:1", "http://b:1"
HISTOGRAM = """# HELP sglang:e2e Seconds of a "request" \\\\ all.
# TYPE sglang:e2e histogram
sglang:e2e_sum{model_name="m"} 3.5
sglang:e2e_bucket{le="1.0",model_name="m"} 1.0
sglang:e2e_bucket{le="+Inf",model_name="m"} 2.0
sglang:e2e_count{model_name="m"} 2.0
# HELP sglang:tokens_total Tokens.
# TYPE sglang:tokens_total counter
sglang:tokens_total 7.0
"""


def read(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_each_family_is_described_once_and_its_samples_stand_together() -> None:
    text = join({A: HISTOGRAM, B: HISTOGRAM})
    assert text.count("# TYPE sglang:e2e histogram") == text.count("# HELP sglang:e2e ") == 1
    histogram = read(text)["sglang:e2e"]
    assert histogram.type == "histogram" and len(histogram.samples) == 8
    assert {sample.labels["worker"] for sample in histogram.samples} == {A, B}
    assert [sample.value for sample in read(text)["sglang:tokens"].samples] == [7.0, 7.0]


def test_an_engines_own_label_of_that_name_gets_another() -> None:
    (sample,) = read(join({A: 'n{worker="0",x="a,b}\\" c"} 1\n'}))["n"].samples
    assert sample.labels == {"worker": A, "exported_worker": "0", "x": 'a,b}" c'}


def test_values_and_times_are_kept() -> None:
    text = join({A: "a NaN\nb +Inf\nc 1e-07 1395066363000\nd{} -2\n"})
    families = read(text)
    assert math.isnan(families["a"].samples[0].value) and families["b"].samples[0].value == math.inf
    assert families["c"].samples[0].timestamp == 1395066363 and families["d"].samples[0].value == -2


@pytest.mark.parametrize("line", ["<html>", "n{ 1", 'n{a="b} 1', "n one", "{} 1", "n", "9n 1", 'n{a="b"c="d"} 1 2 3'])
def test_a_line_that_is_no_sample_costs_only_itself(line: str) -> None:
    assert read(join({A: f"good 1\n{line}\nalso 2\n"})).keys() == {"good", "also", "furlong_engine_up"}


def test_who_gave_nothing_is_down() -> None:
    up = read(join({A: ""}, down=[B]))["furlong_engine_up"]
    assert {sample.labels["worker"]: sample.value for sample in up.samples} == {A: 1, B: 0}


def test_engines_that_describe_a_family_differently_still_give_a_legal_text() -> None:
    text = join({A: "# TYPE n gauge\nn 1\n", B: "# TYPE n counter\n# HELP n Other.\nn 2\n"})
    assert read(text)["n"].type == "gauge" and len(read(text)["n"].samples) == 2


@given(st.text(), st.text())
def test_whatever_engines_say_the_answer_can_be_read(first: str, second: str) -> None:
    read(join({A: first, B: second}))


LINES = st.lists(
    st.sampled_from(
        ["# TYPE n counter", "# TYPE n_total gauge", "# HELP n x", "n 1", "n_total 1", "n_sum 2", 'n_bucket{le="1"} 1',
         "# TYPE n_sum summary", "m{} 4", "# TYPE", "# EOF", "furlong_engine_up 5", "# TYPE n histogram"]
    )
)  # fmt: skip


def block_of(name: str, kinds: dict[str, str]) -> str:
    """The family that a sample belongs to by the text format's rules."""
    base = next((name.removesuffix(end) for end in ("_bucket", "_sum", "_count") if name.endswith(end)), name)
    return base if name not in kinds and kinds.get(base) in ("histogram", "summary") else name


@given(LINES, LINES)
def test_no_family_comes_twice(first: list[str], second: list[str]) -> None:
    lines = join({A: "\n".join(first), B: "\n".join(second)}).split("\n")
    described = [line.split(None, 3) for line in lines if line.startswith("# TYPE")]
    kinds = {name: kind for _, _, name, kind in described}
    assert len(kinds) == len(described)
    blocks = [block_of(line.split("{")[0], kinds) for line in lines if line and not line.startswith("#")]
    starts = [block for before, block in zip(["", *blocks], blocks, strict=False) if before != block]
    assert len(starts) == len(set(starts)), "the samples of a family stand together"
