"""The ring of consistent hashing."""

import random

from services.router.workers.choice.ring import Ring, hash_of


def names(*numbers: int) -> dict[str, int]:
    return {f"http://10.0.0.{number}:30000": number for number in numbers}


def order(ring: Ring[int]) -> list[list[int]]:
    return [list(ring.walk(b"key %d" % n)) for n in range(200)]


def test_a_walk_meets_every_member_once() -> None:
    ring = Ring(names(*range(20)))
    assert all(sorted(walk) == list(range(20)) for walk in order(ring))
    assert list(Ring({}).walk(b"x")) == []


def test_a_ring_that_changed_is_as_one_made_anew() -> None:
    ring, chance = Ring(names(*range(30))), random.Random(3)
    for _ in range(20):
        members = names(*chance.sample(range(60), chance.randrange(0, 50)))
        ring.set_members(members)
        assert order(ring) == order(Ring(members))


def test_a_member_that_is_registered_anew_keeps_its_keys() -> None:
    ring = Ring(names(1, 2, 3))
    before = order(ring)
    ring.set_members({name: number * 10 for name, number in names(1, 2, 3).items()})
    assert order(ring) == [[number * 10 for number in walk] for walk in before]


def test_a_key_has_the_same_place_in_every_process() -> None:
    assert hash_of(b"a conversation") == 0xC241447FCED4BA50
