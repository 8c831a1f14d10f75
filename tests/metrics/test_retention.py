"""What is too old or too much goes: the oldest first, not what a sink needs, and the disk has its room back."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.metrics import retention
from services.metrics.alerts import ledger
from services.metrics.intake import RecordsIn
from services.metrics.needs import tell_needs
from services.metrics.retention import Needs
from tests.metrics.running import part, until
from tests.metrics.said import Said, events
from tests.metrics.stores import Store, line, store

MIB = 1024 * 1024
TEXT = "y" * 1000


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks often."""
    monkeypatch.setattr(retention, "LOOK_S", 0.05)


def fill(to: Store, num_batches: int, *, begin: int = 0) -> None:
    """Batches of about 100 KB, and a row with each."""
    for number in range(begin, begin + num_batches):
        to.take(*(line(n, text=TEXT) for n in range(100)), part(number, {"train/a": ["last", number]}))


def settled(of: Store, condition: Callable[[], Any]) -> None:
    until(condition, "retention")
    assert not of.writer.failing


def test_size_is_kept_and_the_disk_has_its_room_back(tmp_path: Path) -> None:
    with store(tmp_path / "m.db", max_bytes=2 * MIB) as new:
        fill(new, 50)
        assert new.writer.counts.num_removed == 0  # nothing goes before it is known what is needed
        new.writer.retention.needs = Needs()
        settled(new, lambda: new.reader.num_records() < 2500 and os.stat(new.path).st_size < 4 * MIB)
        settled(new, lambda: new.writer.counts.num_removed == 50 * 101 - new.reader.num_records())
        assert new.reader.num_records() > 1000
        assert new.bodies()[-1] == part(49, {"train/a": ["last", 49]})
        assert len(new.reader.points("r", "train/a")[0]) == 50  # rows are small: they stay


def test_age_takes_records_rows_and_points(tmp_path: Path) -> None:
    with store(tmp_path / "m.db", max_age_s=1.0) as new:
        fill(new, 20)
        new.writer.retention.needs = Needs()
        settled(new, lambda: not new.rows())
        assert new.reader.points("r", "train/a") == ([], [], [])
        new.take(part(3, {"train/b": ["last", 1]}))  # a late part of a step that is gone is a new row
        assert new.rows()[-1]["values"] == {"train/b": 1}


def test_what_a_sink_needs_outlives_its_age(tmp_path: Path) -> None:
    with store(tmp_path / "m.db", max_age_s=0.5) as new:
        fill(new, 20)
        new.writer.retention.needs = Needs(rows={"slow": 5}, batches={"logs": 7})
        settled(new, lambda: len(new.rows()) == 15)
        assert [batch.batch_id for batch in new.reader.batches_after(0, 99)] == list(range(8, 21))
        assert not new.writer.retention.lost
        new.writer.set_cursor("slow", 20, 0).result(10)
        new.writer.set_cursor("logs", 20, 0).result(10)
        settled(new, lambda: not new.rows())


def test_sink_that_costs_too_much_loses_and_it_is_said(tmp_path: Path, said: Said) -> None:
    with store(tmp_path / "m.db", max_bytes=2 * MIB) as new:
        fill(new, 35)
        new.writer.retention.needs = Needs(rows={"jsonl": 35}, batches={"logs": 5, "quick": 35})
        lost = new.writer.retention.lost
        settled(new, lambda: lost and lost == {"logs": new.reader.batches_after(0, 1)[0].batch_id - 6})
        assert "sink_lost_to_retention" in events(said)


def test_taking_in_never_waits_long(tmp_path: Path) -> None:
    with store(tmp_path / "m.db", max_bytes=4 * MIB) as new:
        fill(new, 100)
        new.writer.retention.needs = Needs()
        slowest = 0.0
        for number in range(100, 200):
            began = time.perf_counter()
            fill(new, 1, begin=number)
            slowest = max(slowest, time.perf_counter() - began)
        assert slowest < 0.25  # a step of retention takes 20 ms; the rest is a busy machine
        assert new.writer.counts.num_removed


def test_rows_that_alerts_have_not_judged_stay(tmp_path: Path) -> None:
    with store(tmp_path / "m.db", max_age_s=0.2) as new:
        fill(new, 20)
        asyncio.run(told_needs(new))
        assert new.writer.retention.needs and new.writer.retention.needs.rows == {"alerts": 0}
        settled(new, lambda: new.writer.counts.num_removed)
        new.writer.execute(lambda connection: ledger.write(connection, [], 5, None)).result(10)
        settled(new, lambda: len(new.rows()) == 15)
        assert len(new.rows()) == 15 and not new.writer.retention.lost
        new.writer.execute(lambda connection: ledger.write(connection, [], 20, None)).result(10)
        settled(new, lambda: not new.rows())


async def told_needs(of: Store) -> None:
    """What the service says once, without a sink."""
    telling = asyncio.create_task(tell_needs(of.writer, list))
    await asyncio.sleep(0)
    telling.cancel()


def test_producers_are_known_when_all_that_they_sent_is_gone(tmp_path: Path) -> None:
    with store(tmp_path / "m.db", max_age_s=0.2) as new:
        for number in range(8):
            new.take(line(number), producer="r/tail")
        new.take(line(99), producer="r/last")
        new.writer.retention.needs = Needs()
        settled(new, lambda: new.reader.batches_after(0, 9)[0].batch_id == 9)
        again = RecordsIn("r/tail", 1, 1, tuple(line(number) for number in range(8)))
        assert new.writer.submit(again).result(10).num_known == 8
        assert new.reader.num_records() == 1
