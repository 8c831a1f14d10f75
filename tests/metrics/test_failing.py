"""The disk fails in the worst moments: what was not acknowledged is stored when sent again, and the writer lives."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.metrics import writer
from services.metrics.intake import RecordsIn
from services.metrics.retention import Needs
from services.metrics.store import Opened, open_store
from services.metrics.writer import StoreFailed
from tests.metrics.running import part, until
from tests.metrics.said import Said, events
from tests.metrics.stores import Store, line, store

WAITING = "SELECT run, axis, step"


class Failing:
    """A connection whose statements fail that begin like one of `beginnings`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.beginnings: tuple[str, ...] = ()
        self.error: sqlite3.Error = sqlite3.OperationalError("disk I/O error")

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement.startswith(self.beginnings):
            raise self.error
        return self._connection.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Failing]]:
    """A store with a row that waits, and its first connection."""
    made: list[Failing] = []

    def opened(path: Path, **options: Any) -> Opened:
        found = open_store(path, **options)
        if made:
            return found
        made.append(Failing(found.connection))
        return Opened(made[0], found.salvage)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "open_store", opened)
    monkeypatch.setattr(writer, "OPEN_AGAIN_S", 0.0)
    with store(tmp_path / "m.db", max_age_s=0.5) as new:
        new.take(part(1, {"train/a": 1}, parts=["trainer", "never"]))
        yield new, made[0]
        assert new.deaths == [] and new.writer.is_alive()


@pytest.mark.parametrize("also", [WAITING, "ROLLBACK"])
def test_record_is_stored_when_it_is_sent_again_after_a_commit_that_could_not_be_undone(
    failing: tuple[Store, Failing], also: str
) -> None:
    new, connection = failing
    connection.beginnings = ("COMMIT", also)
    batch = RecordsIn("r/p", 1, 2, (line(2),))
    assert isinstance(new.writer.submit(batch).exception(10), StoreFailed)
    connection.beginnings = ()
    assert new.send_until_taken(batch).num_known == 0
    assert len(new.bodies()) == 2 and new.writer.rows.num_waiting == 1


def test_reads_that_fail_after_retention_or_an_odd_batch_do_not_end_the_writer(
    failing: tuple[Store, Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    new, connection = failing
    new.take(part(2, {"train/a": 1}))
    connection.beginnings = (WAITING,)
    new.writer.retention.needs = Needs()
    until(lambda: not new.rows(), "the row removed")
    known = {"r/q": new.writer.intake.take}
    monkeypatch.setattr(new.writer.intake, "take", lambda batch: known[batch.producer](batch))
    for _ in range(3):
        odd, well = (new.writer.submit(RecordsIn(who, 1, 1, (line(1),))) for who in ("odd", "r/q"))
        assert isinstance(odd.exception(10), StoreFailed)
        well.exception(10)
    connection.beginnings = ()
    assert new.send_until_taken(RecordsIn("r/q", 1, 1, (line(1),))).through_sequence == 1


def test_damage_that_the_undoing_meets_is_set_aside_while_running(failing: tuple[Store, Failing], said: Said) -> None:
    new, connection = failing
    connection.beginnings, connection.error = (WAITING,), sqlite3.DatabaseError("database disk image is malformed")
    new.writer.report_damage("known")
    new.writer.barrier().exception(10)
    assert new.send_until_taken(RecordsIn("r/p", 1, 2, (line(2),))).num_known == 0
    assert "metrics_store_damaged" in events(said) and new.writer.rows.num_waiting == 1


def test_rescue_that_fails_is_tried_again(failing: tuple[Store, Failing], monkeypatch: pytest.MonkeyPatch) -> None:
    new, _ = failing
    rescue, full = writer.open_store, [1, 2]

    def no_room(path: Path, **options: Any) -> Opened:
        if full:
            full.pop()
            raise OSError("no room for the copy")
        return rescue(path, **options)

    monkeypatch.setattr(writer, "open_store", no_room)
    new.writer.report_damage("known")
    until(lambda: "no room" in new.writer.failing, "the reason told")
    assert new.send_until_taken(RecordsIn("r/p", 1, 2, (line(2),))).num_known == 0
    assert len(list(new.path.parent.glob("m.db.damaged-*Z"))) == 1 and not new.writer.failing
