"""Following what comes into a store: places in it, what somebody wants to be shown, and each of that once. Pure.

A place is the ids of the newest record, row and alert that somebody has seen. From any place everything since can be
read, so that whoever comes back with his last place misses nothing and sees nothing twice.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import orjson

from furlong.asking.filters import LogFilter
from furlong.asking.forms import line_form, row_form
from furlong.asking.store import RECORD_BITS, StoreReader

KINDS = ("record", "row", "alert")
_PLACE = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})\.([0-9]{1,18})")


@dataclass(frozen=True)
class Place:
    """How far somebody has seen."""

    record_id: int = 0
    row_id: int = 0
    alert_id: int = 0

    def __str__(self) -> str:
        return f"{self.record_id}.{self.row_id}.{self.alert_id}"

    @classmethod
    def parse(cls, text: str) -> "Place":
        """The inverse of str. Raises ValueError."""
        found = _PLACE.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"a place is RECORD.ROW.ALERT, got {text[:100]!r}")
        return cls(*map(int, found.groups()))


@dataclass(frozen=True)
class Wanted:
    """What somebody wants to be shown. A row is no service's: who asks for one service gets none."""

    lines: LogFilter
    kinds: frozenset[str] = frozenset(KINDS)
    axis: str | None = None

    def has_row(self, run: str, body: bytes) -> bool:
        """Whether a row is wanted."""
        lines = self.lines
        if "row" not in self.kinds or lines.service is not None or lines.instance is not None:
            return False
        if lines.run is not None and run != lines.run:
            return False
        if self.axis is None and lines.rollout_id is None and lines.text is None:
            return True
        if not lines.may_match(body):
            return False
        row = orjson.loads(body)
        return self.axis in (None, row["axis"]) and lines.rollout_id in (None, row.get("rollout_id"))

    def has_alert(self, run: str) -> bool:
        """Whether an alert is wanted."""
        return "alert" in self.kinds and self.lines.run in (None, run)


@dataclass(frozen=True)
class Event:
    """Something to be shown."""

    kind: str
    """record, row or alert."""
    place: Place
    """After it."""
    data: bytes
    """JSON."""


class Follower:
    """Given what comes in order, yields what is wanted and was not seen before."""

    def __init__(self, wanted: Wanted, place: Place) -> None:
        self.wanted, self.place = wanted, place

    def batch(
        self, *, batch_id: int, run: str, received_us: int, top_level: int, bodies: Sequence[bytes]
    ) -> Iterator[Event]:
        """Of the records of a batch."""
        first, seen, lines = batch_id << RECORD_BITS, self.place.record_id, self.wanted.lines
        last = first + len(bodies) - 1
        if last <= seen:
            return
        if "record" in self.wanted.kinds and lines.run in (None, run) and top_level >= lines.level:
            for record_id, body in enumerate(bodies, first):
                if record_id > seen and lines.match(body) is not None:
                    self.place = replace(self.place, record_id=record_id)
                    yield Event("record", self.place, line_form(record_id, received_us, body))
        self.place = replace(self.place, record_id=last)

    def row(self, *, row_id: int, run: str, emitted_us: int, body: bytes) -> Iterator[Event]:
        """Of a row."""
        if row_id > self.place.row_id:
            self.place = replace(self.place, row_id=row_id)
            if self.wanted.has_row(run, body):
                yield Event("row", self.place, row_form(row_id, emitted_us, body))

    def alert(self, *, alert_id: int, run: str, body: bytes) -> Iterator[Event]:
        """Of a change of an alert."""
        if alert_id > self.place.alert_id:
            self.place = replace(self.place, alert_id=alert_id)
            if self.wanted.has_alert(run):
                yield Event("alert", self.place, body)

    def next_of(self, store: StoreReader, *, max_batches: int = 16, max_rows: int = 1000) -> tuple[bool, list[Event]]:
        """Whether there was more in the store, and what of it is wanted; ask again until there is none."""
        # the batch that the place is in, if it is not at its end
        batches = store.batches_after(((self.place.record_id + 1) >> RECORD_BITS) - 1, limit=max_batches)
        rows = store.rows(after=self.place.row_id, last=max_rows)
        alerts = store.alerts(after=self.place.alert_id, last=max_rows)
        before = self.place
        events: list[Event] = []
        for batch_id, run, received_us, top_level, body in batches:
            events += self.batch(
                batch_id=batch_id, run=run, received_us=received_us, top_level=top_level, bodies=body.split(b"\n")
            )
        for row_id, emitted_us, body in rows:
            events += self.row(row_id=row_id, run=orjson.loads(body)["run"], emitted_us=emitted_us, body=body)
        for alert in alerts:
            events += self.alert(alert_id=int(str(alert["id"])), run=str(alert["run"]), body=orjson.dumps(alert))
        return self.place != before, events


def place_now(store: StoreReader) -> Place:
    """The end of the store."""
    ids = store.ids()
    return Place(ids.record_id, ids.row_id, ids.alert_id)
