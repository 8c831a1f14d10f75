"""What is read from a histogram lies where the times that were counted lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.watch.buckets import BOUNDS_S, NUM_BUCKETS, bucket_of, quantile


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.001, 0), (0.0011, 1), (1000.0, 18), (1000.1, 19)])
def test_bound_belongs_to_its_bucket(seconds: float, bucket: int) -> None:
    assert bucket_of(seconds) == bucket


def test_nothing_counted_has_no_quantile() -> None:
    assert quantile([0] * NUM_BUCKETS, 0.5) is None


def test_what_is_above_the_last_bound_is_told_as_it() -> None:
    assert quantile([0] * (NUM_BUCKETS - 1) + [3], 0.5) == BOUNDS_S[-1]


@given(st.lists(st.floats(0.0, 999.0), min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_quantile_lies_in_the_bucket_of_the_true_one(times: list[float], share: float) -> None:
    counts = [0] * NUM_BUCKETS
    for seconds in times:
        counts[bucket_of(seconds)] += 1
    rank = next(n for n in range(1, len(times) + 1) if n >= share * len(times))
    bucket = bucket_of(sorted(times)[rank - 1])
    found = quantile(counts, share)
    low = BOUNDS_S[bucket - 1] if bucket else 0.0
    assert found is not None and low <= found <= BOUNDS_S[bucket] * (1 + 1e-9)
