"""How parts become a row."""

import itertools
import math

import pytest

from furlong.records import Last, Max, Mean, Min, Sum, Value
from services.metrics.reducer import Part, RowKey, Step, merge, read_part, reduce_step

KEY = RowKey("r", "train/step", 1, 1)


def part(values: dict[str, Value], name: str = "a", parts: tuple[str, ...] = ("a",)) -> Part:
    return Part(KEY, name, parts, None, values)


def row_of(*parts: tuple[str, Part]) -> dict[str, object]:
    step = Step(KEY)
    for producer, said in parts:
        assert merge(step, said, producer=producer, incarnation=1) == []
    return dict(reduce_step(step).values)


def test_mean_is_of_tokens_and_not_of_means() -> None:
    row = row_of(("p", part({"x": Mean(0.2 * 100, 100)})), ("q", part({"x": Mean(2.0, 1)})))
    assert row["x"] == pytest.approx(0.2178, abs=1e-4)


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [(Sum(1), Sum(2), 3), (Min(1), Min(2), 1), (Max(1), Max(2), 2), (Last(1), Last(2), 2), (Mean(1, 1), Mean(0, 0), 1)],
)
def test_each_kind_reduces_as_it_says(first: Value, second: Value, result: float) -> None:
    assert row_of(("p", part({"x": first})), ("q", part({"x": second})))["x"] == result


def test_mean_of_nothing_gives_no_value() -> None:
    assert row_of(("p", part({"x": Mean(0, 0), "y": Last(0)}))) == {"y": 0}


def test_nonfinite_number_is_kept_and_counted() -> None:
    row = row_of(("p", part({"x": Mean(math.nan, 2), "y": Last(-math.inf)})), ("q", part({"x": Mean(1, 1)})))
    assert row == {"x": "NaN", "x/nonfinite": 1, "y": "-Infinity", "y/nonfinite": 1}


def test_overflow_of_finite_parts_is_counted_too() -> None:
    row = row_of(("p", part({"x": Sum(1e308)})), ("q", part({"x": Sum(1e308)})))
    assert row == {"x": "Infinity", "x/nonfinite": 1}


@pytest.mark.parametrize("kind", [Min, Max])
def test_nan_does_not_hide_in_min_and_max(kind: type[Min] | type[Max]) -> None:
    for first, second in [(math.nan, 1), (1, math.nan)]:
        assert row_of(("p", part({"x": kind(first)})), ("q", part({"x": kind(second)})))["x"] == "NaN"


def test_order_of_arrival_does_not_change_a_bit() -> None:
    said = [(f"p{n}", part({"x": Mean(0.1 * 3**n, 1)}, f"a{n}")) for n in range(6)]
    rows = {str(row_of(*order)) for order in itertools.permutations(said)}
    assert len(rows) == 1


def test_conflicting_kinds_are_told_and_the_first_kept() -> None:
    step = Step(KEY)
    merge(step, part({"x": Sum(1)}), producer="p", incarnation=1)
    problems = merge(step, part({"x": Last(5), "y": Last(1)}), producer="p", incarnation=1)
    assert "x" in problems[0]
    assert reduce_step(step).values == {"x": 1, "y": 1}


def test_producer_that_started_again_replaces_what_it_said() -> None:
    step = Step(KEY)
    for incarnation, value in [(1, 10), (2, 1), (1, 100)]:
        merge(step, part({"x": Sum(value)}), producer="p", incarnation=incarnation)
    assert reduce_step(step).values == {"x": 1}


def test_row_is_complete_when_all_its_parts_are_in() -> None:
    step = Step(KEY)
    merge(step, part({"x": Sum(1)}, "a", ("a", "b")), producer="p", incarnation=1)
    assert not step.is_complete
    merge(step, part({}, "b", ("a", "b")), producer="q", incarnation=1)
    assert step.is_complete


GOOD = {"event": "metrics", "axis": "train/step", "step": 1, "part": "a", "parts": ["a"], "values": {}}


WRONG: list[dict[str, object]] = [
    *(
        {"axis": "x y"},
        {"axis": "x/"},
        {"axis": "x" * 129},
        {"axis": None},
        {"step": "1"},
        {"step": 1.5},
        {"step": True},
        {"step": 2**63},
        {"part": 1},
        {"parts": "a"},
    ),
    *(
        {"axis": ["train/step"]},
        {"part": ["a"]},
        {"values": []},
        {"values": None},
        {"attempt": "1"},
        {"rollout_id": "x"},
        {"run": 3},
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_record_without_a_place_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        read_part({**GOOD, **wrong})


def test_mean_is_of_the_numbers_that_are_there() -> None:
    given: list[dict[str, object]] = [{"a": ["mean", 1, 1]}, {}, {"a": None}, {"a": "x"}, {"a": ["mean", 2, 1]}]
    parts = [read_part({**GOOD, "values": values, "part": str(n)}) for n, values in enumerate(given)]
    assert [list(part.bad_values) for part in parts] == [[], [], ["a"], ["a"], []]
    assert row_of(*((str(n), part) for n, part in enumerate(parts))) == {"a": 1.5}


def test_bad_value_costs_only_itself() -> None:
    said = read_part(
        {**GOOD, "values": {"x": ["last", 1], "y": ["last", "1"], "z": ["mean", 1], "w": 3, "v": [[], 1], "u": [{}, 1]}}
    )
    assert said.values == {"x": Last(1), "w": Last(3)}
    assert list(said.bad_values) == ["y", "z", "v", "u"]


@pytest.mark.parametrize("count", [-1, -0.5, "NaN", "Infinity", "-Infinity"])
def test_mean_whose_count_is_none_is_left_out(count: object) -> None:
    """-3 tokens would take away from what others counted."""
    part = read_part({"axis": "a", "step": 1, "values": {"bad": ["mean", 6.0, count], "good": ["mean", 6.0, 2]}})
    assert part.values == {"good": Mean(6.0, 2)} and list(part.bad_values) == ["bad"]
