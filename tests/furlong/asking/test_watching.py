"""Who watches hears of every end: a store that cannot be read, and an error that nobody foresaw."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from furlong.asking.filters import LogFilter
from furlong.asking.following import Place, Wanted
from furlong.asking.source import Found
from furlong.asking.store import SCHEMA_VERSION, StoreReader
from furlong.asking.watching import Ended, Item, Note, Watcher
from furlong.process import ExitCode

LIMIT_S = 10.0


class Counted(StoreReader):
    """Tells whether it was closed."""

    num_open = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        Counted.num_open += 1

    def close(self) -> None:
        super().close()
        Counted.num_open -= 1


def items_of(find: Callable[[], Found], count: int) -> list[Item]:
    watcher = Watcher(find, Wanted(LogFilter()), Place(), has_ended=lambda away_s: True).start()
    try:
        return [watcher.items.get(timeout=LIMIT_S) for _ in range(count)]
    finally:
        watcher.stop()


def broken_store(folder: Path) -> Path:
    """Its header is well."""
    with sqlite3.connect(folder / "metrics.db") as store:
        store.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return folder / "metrics.db"


def test_store_that_is_damaged_is_told_and_the_run_ends(tmp_path: Path) -> None:
    path = broken_store(tmp_path)
    note, end = items_of(lambda: Found(None, Counted(path), None), 2)
    assert isinstance(note, Note) and "cannot be read" in note.text and "Start the metrics service" in note.text
    assert (end, Counted.num_open) == (Ended(""), 0)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_error_that_nobody_foresaw_ends_the_watching_aloud() -> None:
    def find() -> Found:
        raise RuntimeError("odd")

    assert items_of(find, 1) == [Ended("watching ended: RuntimeError('odd')", ExitCode.CRASHED)]
