"""The same run in other shapes gives the same numbers."""

import math

import pytest

from furlong.process import ExitCode
from tests.system.conftest import Start
from tests.system.real_runs import Up, final_weights, values


def finished(up: Up) -> Up:
    assert up.end() == ExitCode.DONE, up.told()
    return up


def test_same_seed_gives_the_same_numbers_bit_for_bit(start: Start, whole_run: Up) -> None:
    again = finished(start())
    assert values(again.run_dir) == values(whole_run.run_dir)
    assert final_weights(again.run_dir) == final_weights(whole_run.run_dir)


def test_another_seed_gives_other_numbers(start: Start, whole_run: Up) -> None:
    other = finished(start("--seed", "8", "--num-rollout", "1"))
    assert values(other.run_dir)["rollout/step", 0] != values(whole_run.run_dir)["rollout/step", 0]


@pytest.mark.slow
def test_two_engines_give_the_same_numbers_bit_for_bit(start: Start, whole_run: Up) -> None:
    other = finished(start("--rollout-num-engines", "2"))
    assert values(other.run_dir) == values(whole_run.run_dir)


@pytest.mark.slow
def test_two_trainer_ranks_give_the_same_numbers_to_rounding(start: Start, whole_run: Up) -> None:
    """In the first rollout: rounding in its weights may make a later one sample other tokens."""
    other = values(finished(start("--trainer-num-ranks", "2", "--num-rollout", "1")).run_dir)
    one = values(whole_run.run_dir)
    for key in [("rollout/step", 0), ("train/step", 1), ("train/step", 2)]:
        assert one[key].keys() == other[key].keys()
        for name, value in one[key].items():
            assert math.isclose(float(value), float(other[key][name]), rel_tol=1e-4, abs_tol=1e-4), (key, name)


@pytest.mark.slow
def test_ipv6_loopback_works(start: Start, whole_run: Up) -> None:
    other = finished(start("--host", "::1"))
    assert "ready at [::1]:" in other.stdout
    assert values(other.run_dir) == values(whole_run.run_dir)
