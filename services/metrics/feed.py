"""What comes into the store, live, to who listens: a bounded queue a listener. Costs nothing while nobody does.

Published from the writer's thread after each commit, so that nothing is shown that could be lost. A listener that is
too slow loses the oldest of its queue, is told how much, and may read it from the store. It never slows the writer.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from services.metrics.rows import Row, StoredBatch
from services.metrics.writer import Committed

MAX_QUEUED_BYTES = 16 * 1024 * 1024
MAX_QUEUED_ITEMS = 4096
TAKE_BYTES = 512 * 1024
"""At a time: what a listener has taken and cannot get rid of is its own, while what waits is shared by all of them."""
MAX_LISTENERS = 100


class TooManyListeners(Exception):
    """No more can be served."""


@dataclass(frozen=True)
class AlertChange:
    """An alert that began or ceased to fire."""

    alert_id: int
    run: str
    body: bytes
    """JSON object."""


Item = StoredBatch | Row | AlertChange


class Listener:
    """One queue. Event loop only."""

    def __init__(self) -> None:
        self._items: deque[tuple[Item, int]] = deque()
        self._size_bytes = 0
        self._num_lost = 0
        self._has_some = asyncio.Event()
        self.closed = False

    async def next(self, timeout_s: float) -> tuple[int, list[Item]]:
        """How many items were lost before, and the oldest that wait, about TAKE_BYTES of them; nothing when the time is
        up, or the feed has closed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_some.wait(), timeout_s)
        lost, self._num_lost = self._num_lost, 0
        items: list[Item] = []
        taken = 0
        while self._items and taken < TAKE_BYTES:
            item, size = self._items.popleft()
            items.append(item)
            taken += size
        self._size_bytes -= taken
        if not self._items:
            self._has_some.clear()
        return lost, items

    def drop_all(self) -> None:
        """Forget what waits; it is read from the store."""
        self._items.clear()
        self._size_bytes = self._num_lost = 0
        if not self.closed:
            self._has_some.clear()

    def put(self, item: Item, size_bytes: int) -> None:
        """Add one, at the cost of the oldest."""
        self._items.append((item, size_bytes))
        self._size_bytes += size_bytes
        while len(self._items) > MAX_QUEUED_ITEMS or (self._size_bytes > MAX_QUEUED_BYTES and len(self._items) > 1):
            dropped, size = self._items.popleft()
            self._size_bytes -= size
            self._num_lost += len(dropped.bodies) if isinstance(dropped, StoredBatch) else 1
        self._has_some.set()

    def close(self) -> None:
        """Nothing will come any more."""
        self.closed = True
        self._has_some.set()


class Feed:
    """Made in the event loop; `publish` is called from the writer's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: set[Listener] = set()
        self._closed = False

    def publish(self, committed: Committed) -> None:
        """Any thread. Who begins to listen after a commit finds it in the store."""
        if self._listeners:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._deliver, [*committed.batches, *committed.rows])

    def publish_alert(self, alert_id: int, run: str, body: bytes) -> None:
        """Once it is in the store. Event loop only."""
        self._deliver([AlertChange(alert_id, run, body)])

    def listen(self) -> Listener:
        """Give it back with `leave`. Raises TooManyListeners."""
        if len(self._listeners) >= MAX_LISTENERS:
            raise TooManyListeners
        listener = Listener()
        if self._closed:
            listener.close()
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def close(self) -> None:
        """The service stops: who listens is let go."""
        self._closed = True
        for listener in self._listeners:
            listener.close()

    def _deliver(self, items: Sequence[Item]) -> None:
        for item in items:
            size = sum(map(len, item.bodies)) if isinstance(item, StoredBatch) else len(item.body)
            for listener in self._listeners:
                listener.put(item, size)
