"""Watches a metrics service for ever: its live stream, over its restarts and address changes, each event once.

A thread reads, whoever asks takes what has come. When the service is gone and its run directory is there, what it
stored last is read from the store. Never holds more than a bounded queue: then the service is left to wait.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from furlong.asking.client import LiveEvent, MetricsClient, Refused, Unreachable
from furlong.asking.following import Event, Follower, Place, Wanted
from furlong.asking.source import Found, live_params
from furlong.asking.store import NoStore, told_damage
from furlong.process import ExitCode

MAX_QUEUED = 20_000
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True)
class Note:
    """Something about the watching itself."""

    text: str


@dataclass(frozen=True)
class Ended:
    """Nothing will come any more."""

    error: str
    """Empty: the run has ended."""
    code: ExitCode = ExitCode.BAD_CONFIG
    """Of an error."""


Item = Event | Note | Ended


class Watcher:
    """Events from a place on, in `items`."""

    def __init__(
        self, find: Callable[[], Found], wanted: Wanted, place: Place, *, has_ended: Callable[[float], bool]
    ) -> None:
        """has_ended: whether a service that has been away for so many seconds will not come back."""
        self.items: queue.Queue[Item] = queue.Queue(MAX_QUEUED)
        self._find, self._wanted, self._place, self._has_ended = find, wanted, place, has_ended
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> "Watcher":
        self._thread.start()
        return self

    def stop(self) -> None:
        """Nobody takes items any more."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # the top of the thread: whoever waits for items must hear of it
            self._put(Ended(f"watching ended: {error!r}", ExitCode.CRASHED))

    def _watch(self) -> None:
        away_since: float | None = None
        pause_s = FIRST_PAUSE_S
        while not self._stopped.is_set():
            try:
                for item in self._events():
                    if away_since is not None and time.monotonic() - away_since > 1.0:
                        self._put(Note("the metrics service is back"))
                    away_since, pause_s = None, FIRST_PAUSE_S
                    if item is not None:
                        self._put(item)
                continue  # a gap: at once again, from the store
            except Refused as error:
                self._put(Ended(f"{error.error}. {error.remedy}"))
                return
            except (Unreachable, NoStore) as error:
                reason = str(error)
            if away_since is None:
                away_since = time.monotonic()
                self._put(Note(f"{reason}; waiting for it"))
            if self._has_ended(time.monotonic() - away_since):
                with contextlib.suppress(Unreachable, NoStore):
                    self._drain_store()
                self._put(Ended(""))
                return
            self._stopped.wait(pause_s)
            pause_s = min(MAX_PAUSE_S, pause_s * 2)

    def _events(self) -> Iterator[Event | None]:
        """Of the service, or of the store that it left; ends at a gap. None: it is there. Raises as `find` does."""
        found = self._find()
        if found.client is None:
            self._drain_store(found)
            raise Unreachable("the metrics service is gone")
        for event in self._stream(found.client):
            if event.name == "gap":
                return
            if event.place:
                self._place = Place.parse(event.place)
            yield Event(event.name, self._place, event.data) if event.name in self._wanted.kinds else None

    def _stream(self, client: MetricsClient) -> Iterator[LiveEvent]:
        kinds = ",".join(sorted(self._wanted.kinds))
        params = {**live_params(self._wanted.lines), "kinds": kinds, "axis": self._wanted.axis}
        yield from client.live(params, str(self._place))

    def _drain_store(self, found: Found | None = None) -> None:
        """What is in the store of a service that is gone. Raises NoStore, and as `find` does."""
        store = (found or self._find()).store
        if store is None:
            return
        follower = Follower(self._wanted, self._place)
        has_more = True
        with contextlib.closing(store), told_damage(store.path):
            while has_more and not self._stopped.is_set():
                has_more, events = follower.next_of(store)
                for event in events:
                    self._put(event)
                self._place = follower.place

    def _put(self, item: Item) -> None:
        while not self._stopped.is_set():
            try:
                self.items.put(item, timeout=0.5)
                return
            except queue.Full:
                continue
