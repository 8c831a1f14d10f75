"""What is read from a histogram lies where the times that were counted lie."""

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from services.router.watch.buckets import BOUNDS_S, NUM_BUCKETS, quantile


def test_nothing_counted_has_no_quantile() -> None:
    assert quantile([0] * NUM_BUCKETS, 0.5) is None


def test_what_is_above_the_last_bound_is_told_as_it() -> None:
    assert quantile([0] * (NUM_BUCKETS - 1) + [3], 0.5) == BOUNDS_S[-1]


@given(st.lists(st.floats(0.0, 999.0), min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_quantile_lies_in_the_bucket_of_the_true_one(times: list[float], share: float) -> None:
    counts = [0] * NUM_BUCKETS
    for seconds in times:
        counts[bisect_left(BOUNDS_S, seconds)] += 1
    rank = next(n for n in range(1, len(times) + 1) if n >= share * len(times))
    bucket = bisect_left(BOUNDS_S, sorted(times)[rank - 1])
    found = quantile(counts, share)
    low = BOUNDS_S[bucket - 1] if bucket else 0.0
    assert found is not None and low <= found <= BOUNDS_S[bucket] * (1 + 1e-9)
