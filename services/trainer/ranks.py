"""Several ranks as one backend: rank 0's calls are announced through the store and made by all.

The other ranks wait for a call at the store, outside of any collective, as long as rank 0 lives: a slow rollout times
nothing out. A rank that dies ends the others within seconds, whatever they wait for (`PeerWatch`).
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import structlog
import torch
from torch.distributed import DistError, Store

from furlong.process import ExitCode
from furlong.telemetry import Telemetry
from services.trainer.backend import Backend, TensorLayout, TrainerState, TrainResult
from services.trainer.batch import Batch
from services.trainer.rendezvous import Peer

log = structlog.get_logger()

POLL_S = 0.5
END = "end"
STOP_KEY = "stop_requested"


class PeerLost(Exception):
    """A trainer rank went away."""


LOST_CONNECTION = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another rank's process ended under it."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_CONNECTION)


class PeerWatch:
    """Ends this process with PEER_LOST when another rank's process is gone, even from within a collective."""

    def __init__(self, peers: Sequence[Peer], telemetry: Telemetry) -> None:
        self._peers, self._telemetry = peers, telemetry
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)

    def start(self) -> "PeerWatch":
        if self._peers:
            self._thread.start()
        return self

    def stop(self) -> None:
        """From now on the others may end."""
        self._off.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._off.wait(POLL_S):
            for peer in self._peers:
                if not peer.alive() and not self._off.is_set():
                    log.error("peer_lost", peer=f"trainer-{peer.rank}", pid=peer.pid)
                    self._telemetry.flush(1.0)
                    os._exit(ExitCode.PEER_LOST)  # the main thread may sit in a collective that nothing interrupts


class Everyone:
    """Rank 0's view: a Backend whose calls are made by every rank."""

    def __init__(self, backend: Backend, store: Store) -> None:
        self._backend, self._store = backend, store
        self._count = 0

    @property
    def vocabulary_size(self) -> int:
        return self._backend.vocabulary_size

    @property
    def train_step(self) -> int:
        return self._backend.train_step

    @property
    def skipped_steps(self) -> int:
        return self._backend.skipped_steps

    @property
    def peak_flops(self) -> float | None:
        return self._backend.peak_flops

    def layouts(self) -> Sequence[TensorLayout]:
        return self._backend.layouts()

    def train(self, batch: Batch) -> TrainResult:
        return self._call("train", batch)

    def weights_are_finite(self) -> bool:
        return self._call("weights_are_finite")

    def gather(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        return self._call("gather", names)

    def state(self) -> TrainerState | None:
        return self._call("state")

    def restore(self, folder: str) -> None:
        return self._call("restore", folder)

    def end(self) -> None:
        """Let the other ranks go; returns when all have heard it."""
        self._announce(END, ())
        torch.distributed.barrier()

    def _call(self, name: str, *arguments: object) -> Any:  # Any: what the named method answers
        self._announce(name, arguments)
        return getattr(self._backend, name)(*arguments)

    def _announce(self, name: str, arguments: tuple[object, ...]) -> None:
        self._store.set(f"call/{self._count}", name)
        if self._count >= 8:  # every rank is past those: each call is a collective
            self._store.delete_key(f"call/{self._count - 8}")
        self._count += 1
        torch.distributed.broadcast_object_list([name, arguments], src=0, device=torch.device("cpu"))


def follow(backend: Backend, store: Store, *, at_end: Callable[[], None]) -> None:
    """Another rank's life: make the calls that rank 0 announces until it says the end. Raises PeerLost."""
    count = 0
    while True:
        _wait_for_call(store, count)
        count += 1
        heard: list[Any] = [None, None]  # Any: filled by the broadcast
        torch.distributed.broadcast_object_list(heard, src=0, device=torch.device("cpu"))
        name, arguments = heard
        if name == END:
            at_end()
            torch.distributed.barrier()
            return
        getattr(backend, name)(*arguments)


def _wait_for_call(store: Store, count: int) -> None:
    """No time limit of its own: the store is rank 0's, and lives as long as rank 0 does."""
    while True:
        begun = time.monotonic()
        try:
            store.wait([f"call/{count}"], timedelta(seconds=POLL_S))
            return
        except (DistError, RuntimeError) as error:
            if time.monotonic() - begun < POLL_S * 0.9:  # not the time-out: the connection broke
                raise PeerLost(f"trainer-0 is gone: {str(error)[:200]}") from error
