"""A backlog leaves the processor to producers that send much, and only to them."""

import pytest

from services.metrics.rows import StoredBatch
from services.metrics.tailing.pace import BUSY_BYTES, WINDOW_S, Pace
from services.metrics.writer import Committed


def commit(producer: str, size_bytes: int) -> Committed:
    return Committed([StoredBatch(1, "r", producer, 1, 0, (b"x" * size_bytes,), 20)], [])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_producer_that_sends_much_slows_a_backlog_until_it_is_silent(clock: list[float]) -> None:
    pace = Pace("r/tail")
    pace.committed(commit("r/trainer-0", BUSY_BYTES + 1))
    assert pace.rest_s(0.01) == pytest.approx(0.04)
    clock[0] += WINDOW_S + 0.01
    assert pace.rest_s(0.01) == 0.0


def test_own_lines_and_a_few_of_others_do_not(clock: list[float]) -> None:
    pace = Pace("r/tail")
    pace.committed(commit("r/tail", 10 * BUSY_BYTES))
    for _ in range(10):
        clock[0] += WINDOW_S
        pace.committed(commit("r/trainer-0", BUSY_BYTES // 4))
    assert pace.rest_s(0.01) == 0.0
