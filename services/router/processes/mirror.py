"""The registry in a secondary: a copy of the primary's, which it follows; and what it tells the primary it has seen.

Never decides over a worker's life but to stop using one whose address refused a connection, until the primary, which is
told at once, says what is so.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from services.router.processes.counts import SharedCounts
from services.router.processes.frames import Frame
from services.router.processes.registry import SharedWorkers
from services.router.settings import RouterSettings
from services.router.workers.breaker import Breaker
from services.router.workers.registration import Registration
from services.router.workers.urls import WorkerUrl
from services.router.workers.worker import Life, Worker

Entry = dict[str, Any]  # Any: JSON's own open tree


def entry_of(worker: Worker) -> Entry:
    """What a secondary needs to choose a worker. Holds its key: only for the link."""
    said, url = worker.registration, worker.url
    return {
        "id": worker.worker_id,
        "slot": worker.slot,
        "url": [url.scheme, url.host, url.port],
        "type": said.worker_type,
        "labels": dict(said.labels),
        "priority": said.priority,
        "key": said.api_key,
        "self_admitting": worker.self_admitting,
        "admitted": worker.admitted,
        "was_admitted": worker.was_admitted,
        "policy_version": worker.policy_version,
        "life": worker.life.value,
        "last_error": worker.last_error,
    }


class ProbeWish(asyncio.Event):
    """A secondary's wish that a worker be probed soon: the primary has the probes."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def set(self) -> None:
        self._tell()


class News:
    """What was seen of workers and not told yet: the newest of each worker and kind, sent once a turn of the loop."""

    def __init__(self, send: Callable[[Frame], bool]) -> None:
        """send: False when it cannot be sent now; `flush` is then called again later."""
        self._send = send
        self._of: dict[str, dict[str, str]] = {}
        self._due = False

    def add(self, worker: Worker, kind: str, error: str = "") -> None:
        """kind: gone, failed or probe."""
        self._of.setdefault(worker.worker_id, {})[kind] = error
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what there is."""
        self._due = False
        if self._of and self._send({"news": self._of}):
            self._of = {}


class MirrorWorkers(SharedWorkers):
    """The workers as the primary last told."""

    def __init__(self, settings: RouterSettings, counts: SharedCounts, *, news: News) -> None:
        super().__init__(settings, counts)
        self._news = news

    def follow(self, entries: list[Entry]) -> None:
        """Take over the whole registry."""
        told = {entry["id"] for entry in entries}
        for worker in [w for w in self._current.values() if w.worker_id not in told]:
            self._leave(worker)
        workers = [self._by_id.get(entry["id"]) or self._joined(entry) for entry in entries]
        self._current.clear()
        for worker, entry in zip(workers, entries, strict=True):
            self._current[worker.url] = worker
            _set(worker, entry)
        self._breakers_seen = 0
        self._changed()
        self.recount()

    def failed(self, worker: Worker, error: str) -> None:
        """A request ended in an error on the worker's side."""
        self._news.add(worker, "failed", error)
        super().failed(worker, error)

    def gone(self, worker: Worker, error: str) -> None:
        """Nobody listens at its address."""
        self._news.add(worker, "gone", error)
        super().gone(worker, error)

    def _joined(self, entry: Entry) -> Worker:
        worker = Worker(
            worker_id=entry["id"],
            url=WorkerUrl(*entry["url"]),
            slot=entry["slot"],
            registration=Registration(
                worker_type=entry["type"], labels=entry["labels"], priority=entry["priority"], api_key=entry["key"]
            ),
            self_admitting=entry["self_admitting"],
            admitted=entry["admitted"],
            was_admitted=entry["was_admitted"],
            breaker=Breaker(failures_to_open=1, pause_s=0.0),  # the shared one comes with its slot
        )
        worker.probe_soon = ProbeWish(lambda: self._news.add(worker, "probe"))
        self._by_id[worker.worker_id] = worker
        self._counts.joined(worker)
        return worker


def _set(worker: Worker, entry: Entry) -> None:
    worker.self_admitting = entry["self_admitting"]
    worker.admitted = entry["admitted"]
    worker.was_admitted = entry["was_admitted"]
    worker.policy_version = entry["policy_version"]
    worker.life = Life(entry["life"])
    worker.last_error = entry["last_error"]
