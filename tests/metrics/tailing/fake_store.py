"""A store in memory: what a tailer's records and marks become, and what is left of them after a kill."""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import orjson

from services.metrics.tailing.followed import Moment
from services.metrics.tailing.follower import Batch, Follower
from services.metrics.tailing.tailer import _now


class FakeStore:
    """Takes batches at once; fails when told to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.marks: dict[str, bytes] = {}
        self.num_failures = 0
        self.num_saved = 0

    def load(self) -> dict[str, bytes]:
        return dict(self.marks)

    def submit(self, bodies: tuple[bytes, ...], marks: Mapping[str, bytes | None]) -> "Future[object]":
        done: Future[object] = Future()
        if self.num_failures > 0:
            self.num_failures -= 1
            done.set_exception(OSError("no space left"))
            return done
        self.bodies += bodies
        for name, body in marks.items():
            if body is None:
                self.marks.pop(name, None)
            else:
                self.marks[name] = body
        done.set_result(None)
        return done

    def saved(self, num_records: int) -> None:
        self.num_saved += num_records

    @property
    def records(self) -> list[dict[str, Any]]:
        return [orjson.loads(body) for body in self.bodies]

    @property
    def texts(self) -> list[str]:
        return [str(record["text"]) for record in self.records]


class Hand:
    """Moves a follower by hand: each look is a call, time is an argument."""

    def __init__(self, *patterns: str | Path, store: FakeStore | None = None) -> None:
        self.store = store or FakeStore()
        self._patterns = [str(pattern) for pattern in patterns]
        self.ahead_s = 0.0
        self.start()

    def start(self) -> None:
        """A service that starts with the marks that were saved; the one before is gone as after a kill."""
        self.follower = Follower(self._patterns, run="r", marks=self.store.load())

    def moment(self) -> Moment:
        now = _now()
        return Moment(now.now, now.mono_s + self.ahead_s)

    def look(self, *, discover: bool = True, pass_s: float = 0.0) -> list[str]:
        """One look at everything, saved; the texts that came."""
        self.ahead_s += pass_s
        batch, moment = Batch(), self.moment()
        if discover:
            self.follower.discover(moment, batch)
        while self.follower.read(moment, batch, max_bytes=10**9):
            pass
        return self._save(batch)

    def finish(self) -> list[str]:
        batch = Batch()
        self.follower.finish(self.moment(), batch)
        texts = self._save(batch)
        self.follower.close()
        return texts

    def kill(self) -> None:
        """What was not saved is gone."""
        self.follower.close()
        self.start()

    def _save(self, batch: Batch) -> list[str]:
        before = len(self.store.bodies)
        self.store.submit(tuple(batch.bodies), batch.marks)
        return [str(record.get("text", record)) for record in self.store.records[before:]]
