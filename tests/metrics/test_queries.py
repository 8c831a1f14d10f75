"""Questions beside the writer: limits, and a store that is set aside meanwhile."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from furlong.asking.store import NoStore, StoreReader, TookTooLong
from services.metrics import queries
from services.metrics.queries import Busy, Queries
from services.metrics.store import open_store

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"


def store_with_run(path: Path, name: str) -> None:
    connection = open_store(path).connection
    connection.execute("INSERT INTO runs (name, first_us, last_us) VALUES (?, 1, 1)", (name,))
    connection.close()


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Queries]:
    store_with_run(tmp_path / "metrics.db", "first")
    made = Queries(tmp_path / "metrics.db", limit_s=0.3)
    yield made
    made.close()


def names(store: StoreReader) -> list[object]:
    return [run["run"] for run in store.runs()]


async def test_store_that_was_set_aside_is_left(asked: Queries, tmp_path: Path) -> None:
    assert await asked.ask(names) == ["first"]
    (tmp_path / "metrics.db").rename(tmp_path / "aside")
    with pytest.raises(NoStore):
        await asked.ask(names)
    store_with_run(tmp_path / "metrics.db", "second")
    assert await asked.ask(names) == ["second"]


async def test_question_that_takes_too_long_is_ended(asked: Queries) -> None:
    began = time.monotonic()
    with pytest.raises(TookTooLong):
        await asked.ask(lambda store: store._all(ENDLESS))
    assert time.monotonic() - began < 5.0
    assert await asked.ask(names) == ["first"]


async def test_too_many_questions_are_refused(asked: Queries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_WAITING", 0)
    with pytest.raises(Busy):
        await asked.ask(names)


def test_reading_holds_nobody_back(tmp_path: Path) -> None:
    """A question in the middle of its answer, and a write beside it."""
    path = tmp_path / "metrics.db"
    writer = open_store(path).connection
    reader = StoreReader(path)
    rows = reader._rows("SELECT * FROM sqlite_master")
    next(rows)
    done: Future[None] = Future()

    def write() -> None:
        writer.execute("INSERT INTO runs (name, first_us, last_us) VALUES ('x', 1, 1)")
        done.set_result(None)

    threading.Thread(target=write, daemon=True).start()
    done.result(5)


@pytest.mark.parametrize("content", [b"", b"not a database" * 100])
def test_file_that_is_no_store_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.db").write_bytes(content)
    with pytest.raises(NoStore):
        StoreReader(tmp_path / "metrics.db")
