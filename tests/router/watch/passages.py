"""Requests that are over, as the router's http part hands them over, and workers that are not there."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from furlong.config import RunConfig
from services.router.settings import RouterSettings
from services.router.watch.observer import Observer


@dataclass(eq=False)
class FakeWorker:
    """What is read of a worker."""

    url: str = "http://127.0.0.1:30000"
    state: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(name="READY"))
    in_flight: int = 0
    policy_version: int | None = None
    breaker: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(state="closed"))


@dataclass
class FakeWorkers:
    """What is asked of the registry."""

    everyone: list[FakeWorker] = field(default_factory=list)
    waiting: int = 0

    def all(self) -> list[FakeWorker]:
        return self.everyone

    def num_waiting(self) -> int:
        return self.waiting


@dataclass
class FakePassage:
    """A good request, unless told otherwise: 4 ms to the first byte, 40 ms in all."""

    worker: FakeWorker | None = None
    status: int = 200
    method: str = "POST"
    path: str = "/generate"
    path_class: str = "generate"
    headers: Sequence[tuple[bytes, bytes]] = ()
    request_id: bytes = b"id-1"
    bytes_in: int = 10
    bytes_out: int = 20
    started: float = 100.0
    sent: float = 100.0
    first_byte: float = 100.004
    ended: float = 100.04
    queued_s: float = 0.0
    num_tries: int = 1
    error: str = ""
    error_message: str = ""
    client: str = "127.0.0.1:5"


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def observer_of(*workers: FakeWorker, access_log_every: int = 0, now: Clock | None = None) -> Observer:
    """An observer of workers that are registered."""
    settings = replace(RouterSettings.of(RunConfig()), access_log_every=access_log_every)
    return Observer(settings, FakeWorkers(list(workers)), now=now or Clock())
