"""Values on the wire and how two parts of one become one."""

import math

import orjson
import pytest

from furlong.records import (
    Last,
    Max,
    Mean,
    Min,
    Sum,
    Value,
    combine,
    decode_value,
    encode_number,
    encode_value,
    mean_of,
    reduce_value,
)


@pytest.mark.parametrize("value", [Mean(1.5, 2), Sum(3), Min(-1), Max(2.5), Last(7), Last(math.inf)], ids=str)
def test_value_survives_the_wire(value: Value) -> None:
    assert decode_value(orjson.loads(orjson.dumps(encode_value(value)))) == value


def test_nan_survives_the_wire() -> None:
    decoded = decode_value(orjson.loads(orjson.dumps(encode_value(Mean(math.nan, 3)))))
    assert isinstance(decoded, Mean) and math.isnan(decoded.sum) and decoded.count == 3


@pytest.mark.parametrize(
    "wrong",
    [None, [], "last", ["last"], ["last", None], ["last", "x"], ["last", True], ["mean", 1], ["no", 1], [[], 1]],
)
def test_what_is_no_value_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"must be|not a number"):
        decode_value(wrong)


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
