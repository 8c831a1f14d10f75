"""The choice of a worker, as numbers in and an index out."""

from collections import Counter

from services.router.workers.choice import Load, choose


def test_no_worker_is_no_choice() -> None:
    assert choose([]) is None


def test_fewest_in_flight_wins() -> None:
    assert choose([Load(3, 0, False), Load(1, 9, False), Load(2, 0, False)]) == 1


def test_equals_take_turns() -> None:
    turns = [0, 0, 0]
    picked = []
    for turn in range(1, 10):
        index = choose([Load(0, last, False) for last in turns])
        assert index is not None
        turns[index] = turn
        picked.append(index)
    assert picked == [0, 1, 2] * 3


def test_requests_that_stay_are_spread_evenly() -> None:
    in_flight, turns = [0] * 4, [0] * 4
    for turn in range(1, 101):
        index = choose([Load(n, last, False) for n, last in zip(in_flight, turns, strict=True)])
        assert index is not None
        in_flight[index] += 1
        turns[index] = turn
    assert Counter(in_flight) == {25: 4}


def test_a_failing_worker_is_taken_only_when_all_fail() -> None:
    assert choose([Load(0, 0, True), Load(5, 9, False)]) == 1
    assert choose([Load(4, 0, True), Load(1, 9, True)]) == 1
