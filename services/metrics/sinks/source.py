"""What a sink follows: rows (of all runs or one), or batches of records. Reads a bounded piece at a time.

Never holds what it has read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from services.metrics.bell import News
from services.metrics.rows import Row, RowReader, StoredBatch

Item = TypeVar("Item")

MAX_ITEMS = 256
MAX_BYTES = 8 * 1024 * 1024
MAX_COUNTED = 100_000
FIRST_ITEMS = 16
"""Before it is known how large they are."""


@dataclass(frozen=True)
class Behind:
    """What lies beyond a place."""

    num_items: int
    oldest_us: int
    """When the first of them was handed on, microseconds since the epoch. 0: there is none."""


NOTHING = Behind(0, 0)


class Source(Protocol[Item]):
    """Items with ascending ids. Any thread."""

    def concerns(self, news: News) -> bool:
        """Whether there may be items in it."""

    def passed(self, news: News) -> int:
        """The newest row of it, when there were none of ours in it. 0: that cannot be."""

    def newest_of_others(self) -> int:
        """The newest row, ours or not. 0: all are ours."""

    def after(self, item_id: int, limit: int) -> Sequence[Item]:
        """The next ones."""

    def last_id(self) -> int:
        """The newest."""

    def id_of(self, item: Item) -> int:
        """Its place."""

    def size_of(self, item: Item) -> int:
        """Bytes in memory, about."""

    def behind(self, item_id: int) -> Behind:
        """How much lies beyond."""


class RowSource:
    """Rows, of one run or all."""

    def __init__(self, reader: RowReader, run: str | None = None) -> None:
        self._reader, self._run = reader, run

    @property
    def run(self) -> str | None:
        """None: all."""
        return self._run

    def after(self, item_id: int, limit: int) -> Sequence[Row]:
        return self._reader.after(item_id, limit, run=self._run)

    def concerns(self, news: News) -> bool:
        return bool(news.runs) if self._run is None else self._run in news.runs

    def passed(self, news: News) -> int:
        return 0 if self._run is None else news.last_row_id

    def newest_of_others(self) -> int:
        return 0 if self._run is None else self._reader.last_row_id()

    def last_id(self) -> int:
        if self._run is None:
            return self._reader.last_row_id()
        find = "SELECT coalesce(max(id), 0) FROM rows WHERE run_id = (SELECT id FROM runs WHERE name = ?)"
        return int(self._reader.query(find, (self._run,))[0][0])

    def id_of(self, item: Row) -> int:
        return item.row_id

    def size_of(self, item: Row) -> int:
        return len(item.body) + len(item.prior or b"")

    def behind(self, item_id: int) -> Behind:
        first = self.after(item_id, 1)
        if not first:
            return NOTHING
        return Behind(self._num_after(item_id), first[0].emitted_us)

    def _num_after(self, item_id: int) -> int:
        if self._run is None:
            return self.last_id() - item_id
        count = (
            "SELECT count(*) FROM (SELECT 1 FROM rows WHERE run_id = (SELECT id FROM runs WHERE name = ?)"
            " AND id > ? LIMIT ?)"
        )
        return int(self._reader.query(count, (self._run, item_id, MAX_COUNTED))[0][0])


class BatchSource:
    """Batches of records as producers sent them, of all runs."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader

    def after(self, item_id: int, limit: int) -> Sequence[StoredBatch]:
        return self._reader.batches_after(item_id, limit)

    def concerns(self, news: News) -> bool:
        return news.has_batches

    def passed(self, news: News) -> int:
        return 0

    def newest_of_others(self) -> int:
        return 0

    def last_id(self) -> int:
        return self._reader.last_batch_id()

    def id_of(self, item: StoredBatch) -> int:
        return item.batch_id

    def size_of(self, item: StoredBatch) -> int:
        return sum(map(len, item.bodies))

    def behind(self, item_id: int) -> Behind:
        first = self.after(item_id, 1)
        return Behind(self.last_id() - item_id, first[0].received_us) if first else NOTHING


class Bites(Generic[Item]):
    """Takes from a source as many items at a time as fit MAX_BYTES, going by the sizes of those before."""

    def __init__(self, source: Source[Item]) -> None:
        self.source = source
        self._limit = FIRST_ITEMS
        self.is_full = False
        """The last one was as large as may be: there may well be more."""

    def after(self, item_id: int) -> Sequence[Item]:
        """The next ones. Any thread, one at a time."""
        items = self.source.after(item_id, self._limit)
        self.is_full = len(items) >= self._limit
        if items:
            largest = max(self.source.size_of(item) for item in items)
            self._limit = max(1, min(MAX_ITEMS, self._limit * 2, MAX_BYTES // max(1, largest)))
        return items
