"""The policies, as numbers in and a worker out."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from services.router.workers.choice.group import Choose, Group
from services.router.workers.choice.policies import chooser

NO_LIMIT = 1 << 40


@dataclass(eq=False)
class Fake:
    """A worker as a choice sees it."""

    name: str
    in_flight: int = 0
    last_turn: int = 0


def fakes(*in_flight: int) -> list[Fake]:
    return [Fake(f"http://10.0.0.{index}", load) for index, load in enumerate(in_flight)]


def policy(name: str, *, bounded_load: float = 1.25, seed: int = 1) -> Choose[Fake]:
    return chooser(name, bounded_load=bounded_load, random_source=random.Random(seed))


def spread(choose: Choose[Fake], workers: list[Fake], keys: list[bytes], *, keep: bool) -> list[str]:
    """Who takes each of these, one after the other; keep: none of them is over before the next one."""
    group, names = Group(workers), []
    for turn, key in enumerate(keys, 1):
        chosen = choose(group, key, NO_LIMIT)
        assert chosen is not None
        chosen.last_turn = turn
        chosen.in_flight += keep
        names.append(chosen.name)
    return names


KEYS = [b"session %d" % n for n in range(2000)]
ALL = ["least-in-flight", "round-robin", "power-of-two", "session", "prefix"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("key", [b"", b"session"])
def test_no_worker_is_no_choice_and_one_at_its_limit_is_none(name: str, key: bytes) -> None:
    choose = policy(name)
    assert choose(Group([]), key, NO_LIMIT) is None
    assert choose(Group(fakes(2, 3, 2)), key, 2) is None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("key", [b"", b"session"])
def test_the_only_one_below_the_limit_is_found(name: str, key: bytes) -> None:
    workers = fakes(4, 4, 3, 4)
    assert policy(name)(Group(workers), key, 4) is workers[2]


def test_fewest_in_flight_wins() -> None:
    workers = fakes(3, 1, 2)
    assert policy("least-in-flight")(Group(workers), b"", NO_LIMIT) is workers[1]


def test_equals_take_turns_and_requests_that_stay_are_spread_evenly() -> None:
    workers = fakes(0, 0, 0, 0)
    names = spread(policy("least-in-flight"), workers, [b""] * 8, keep=False)
    assert names == [w.name for w in workers] * 2
    spread(policy("least-in-flight"), workers, [b""] * 100, keep=True)
    assert [w.in_flight for w in workers] == [25] * 4


def test_round_robin_goes_round_whatever_the_load() -> None:
    workers = fakes(9, 0, 5)
    assert spread(policy("round-robin"), workers, [b""] * 6, keep=True) == [w.name for w in workers] * 2


def test_two_choices_are_nearly_even_and_the_same_for_the_same_seed() -> None:
    names = [spread(policy("power-of-two", seed=7), fakes(*[0] * 10), [b""] * 1000, keep=True) for _ in range(2)]
    assert names[0] == names[1]
    counts = Counter(names[0])
    assert len(counts) == 10 and max(counts.values()) - min(counts.values()) <= 12


def test_two_choices_never_take_the_busiest_of_three() -> None:
    workers = fakes(1, 2, 3)
    taken = spread(policy("power-of-two"), workers, [b""] * 200, keep=False)
    assert workers[2].name not in taken and set(taken) == {workers[0].name, workers[1].name}


@pytest.mark.parametrize("name", ["session", "prefix"])
def test_a_key_finds_its_worker_again(name: str) -> None:
    first = spread(policy(name), fakes(*[0] * 8), KEYS, keep=False)
    others = list(reversed(fakes(*[0] * 8)))  # another process, another order of registration
    assert spread(policy(name), others, KEYS, keep=False) == first


def test_when_a_worker_goes_only_its_keys_move() -> None:
    workers = fakes(*[0] * 8)
    before = spread(policy("session"), workers, KEYS, keep=False)
    gone = workers.pop(3)
    after = spread(policy("session"), workers, KEYS, keep=False)
    moved = {old for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {gone.name}
    heirs = Counter(new for old, new in zip(before, after, strict=True) if old == gone.name)
    assert len(heirs) == 7, "what it had is shared out among all"


def test_a_part_of_a_group_moves_only_the_keys_of_those_left_out() -> None:
    workers = fakes(*[0] * 8)
    group = Group(workers)
    part, choose = group.part(workers[1:]), policy("session")
    for key in KEYS[:300]:
        home, now = choose(group, key, NO_LIMIT), choose(part, key, NO_LIMIT)
        assert now is not workers[0] and (now is home or home is workers[0])


def test_keys_are_shared_evenly() -> None:
    counts = Counter(spread(policy("session"), fakes(*[0] * 16), [b"%d" % n for n in range(16000)], keep=False))
    assert len(counts) == 16 and min(counts.values()) > 650 and max(counts.values()) < 1400


def test_a_popular_key_overflows_at_the_bound() -> None:
    workers = fakes(*[0] * 4)
    names = spread(policy("session", bounded_load=1.5), workers, [b"hot"] * 400, keep=True)
    assert max(w.in_flight for w in workers) == 150  # 1.5 times the mean of 100
    assert Counter(names).most_common(1)[0][0] == names[0]


def test_below_the_bound_a_key_stays_though_others_idle() -> None:
    workers = fakes(0, 0)
    home = spread(policy("session"), workers, [b"x"], keep=True)
    assert spread(policy("session", bounded_load=2.0), workers, [b"x"] * 3, keep=False) == home * 3


def test_without_a_key_affinity_takes_the_least_loaded() -> None:
    workers = fakes(4, 0, 2)
    assert policy("session")(Group(workers), b"", NO_LIMIT) is workers[1]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match=r"'sticky'.*--router-policy"):
        policy("sticky")
