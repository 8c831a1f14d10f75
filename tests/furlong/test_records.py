"""Values on the wire and how two parts of one become one."""

import math

import orjson
import pytest

from furlong.records import (
    MAX_BINS,
    MAX_ROWS,
    MAX_TABLE_BYTES,
    Histogram,
    Last,
    Max,
    Mean,
    Min,
    Sum,
    Table,
    Value,
    combine,
    decode_loose,
    decode_value,
    encode_number,
    encode_value,
    histogram_of,
    is_finite,
    mean_of,
    reduce_value,
    row_form,
)

HISTOGRAM = Histogram((0.0, 0.5, 1.0), (3, 1), 2)
TABLE = Table(("prompt", "reward"), (("2+2", 1.0), ("3+3", None)))


@pytest.mark.parametrize(
    "value", [Mean(1.5, 2), Sum(3), Min(-1), Max(2.5), Last(7), Last(math.inf), HISTOGRAM, TABLE], ids=str
)
def test_value_survives_the_wire(value: Value) -> None:
    assert decode_value(orjson.loads(orjson.dumps(encode_value(value)))) == value


def test_nan_survives_the_wire() -> None:
    decoded = decode_value(orjson.loads(orjson.dumps(encode_value(Mean(math.nan, 3)))))
    assert isinstance(decoded, Mean) and math.isnan(decoded.sum) and decoded.count == 3


BAD_SHAPES = [
    ["histogram", [0, 1]],
    ["histogram", [0, 1], [1, 2]],
    ["histogram", [1, 0], [1]],
    ["histogram", [0, "NaN"], [1]],
    ["histogram", [0, 1], [-1]],
    ["histogram", [0, 1], ["Infinity"]],
    ["histogram", list(range(MAX_BINS + 2)), [1] * (MAX_BINS + 1)],
    ["histogram", [0], []],
    ["table", [], []],
    ["table", ["a"], [[1, 2]]],
    ["table", ["a", "a"], []],
    ["table", ["a"], [1]],
    ["table", [7], []],
    ["table", [[1]], []],
    ["table", ["a"], [[[1]]]],
]


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "last",
        ["last"],
        ["last", None],
        ["last", "x"],
        ["last", True],
        ["mean", 1],
        ["no", 1],
        [[], 1],
        *BAD_SHAPES,
    ],
)
def test_what_is_no_value_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"must be|not a number|has|no table"):
        decode_value(wrong)
    assert decode_loose(wrong) is None


@pytest.mark.parametrize("wrong", ["1", None, [1], b"1"])
def test_what_is_no_number_is_refused(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode_number(wrong)  # type: ignore[arg-type]


def test_huge_integer_becomes_a_float_and_large_ones_stay_exact() -> None:
    assert encode_number(2**62 + 1) == 2**62 + 1
    assert encode_number(2**70) == float(2**70)


def test_kinds_do_not_combine_with_each_other() -> None:
    with pytest.raises(ValueError, match="Sum"):
        combine(Sum(1), Last(1))


def test_mean_of_nothing_has_no_number() -> None:
    assert reduce_value(mean_of([])) is None
    assert reduce_value(combine(mean_of([]), mean_of([2, 4]))) == 3


@pytest.mark.parametrize(("plain", "number"), [(3, 3), (0.5, 0.5), (True, 1), ("Infinity", math.inf)])
def test_plain_number_of_another_program_is_its_last_value(plain: object, number: float) -> None:
    assert decode_loose(plain) == Last(number)
    assert decode_loose(["sum", 2]) == Sum(2)


@pytest.mark.parametrize("other", [None, "x", "1", [1, 2], {}, {"a": 1}, [], 1e999 - 1e999j])
def test_what_another_program_sends_that_is_no_number_is_skipped(other: object) -> None:
    assert decode_loose(other) is None


def test_histograms_with_equal_edges_add_up_and_others_are_a_conflict() -> None:
    assert combine(HISTOGRAM, HISTOGRAM) == Histogram((0.0, 0.5, 1.0), (6, 2), 4)
    with pytest.raises(ValueError, match="edges"):
        combine(HISTOGRAM, Histogram((0.0, 1.0), (1,)))


def test_histogram_holds_each_finite_number_once_and_counts_the_others() -> None:
    made = histogram_of([0, 1, 2, 3, 3, math.nan, math.inf], num_bins=3)
    assert made == Histogram((0.0, 1.0, 2.0, 3.0), (1, 1, 3), 2)
    assert made is not None and not is_finite(made) and reduce_value(made) is None


@pytest.mark.parametrize(
    "numbers", [[7.0] * 4, [0.0, 5e-324], [1e308, -1e308, 0.0], [1.7e308, 1.7e308], [1.0, 1.0 + 2**-52], [-0.0, 0.0]]
)
def test_histogram_of_numbers_near_or_far_loses_none(numbers: list[float]) -> None:
    made = histogram_of(numbers)
    assert made is not None and sum(made.counts) == len(numbers)


def test_there_is_no_histogram_of_nothing() -> None:
    assert histogram_of([]) is None and histogram_of([math.nan]) is None


def test_tables_of_the_same_columns_follow_each_other_and_others_are_a_conflict() -> None:
    assert combine(TABLE, TABLE) == Table(TABLE.columns, TABLE.rows * 2)
    with pytest.raises(ValueError, match="columns"):
        combine(TABLE, Table(("prompt",), ()))


def test_table_is_cut_at_its_bounds_and_says_so() -> None:
    long, wide = Table(("a",), ((1,),) * (MAX_ROWS + 1)), Table(("a",), (("x" * 100_000,),) * 4)
    assert (len(long.rows), long.cut) == (MAX_ROWS, True)
    assert wide.cut and len(orjson.dumps(row_form(wide))) <= MAX_TABLE_BYTES + 1000
    assert len(combine(long, long).rows) == MAX_ROWS  # type: ignore[union-attr]
    assert decode_value(encode_value(long)) == long


def test_row_shows_distributions_by_name() -> None:
    assert row_form(HISTOGRAM) == {"edges": [0.0, 0.5, 1.0], "counts": [3, 1]}
    assert row_form(TABLE) == {"columns": ["prompt", "reward"], "rows": [["2+2", 1.0], ["3+3", None]]}
