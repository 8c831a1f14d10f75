"""The process group that weights travel on: trainer rank 0 and the engines, apart from torch's default group.

Made as SGLang makes its end: rendezvous store, PrefixStore by the group's name, torch's group helper. Every operation
has a limit, and none of them blocks the caller beyond it.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import structlog
import torch
import torch.distributed
from torch.distributed import PrefixStore, ProcessGroup, TCPStore, distributed_c10d

log = structlog.get_logger()

POLL_S = 0.0005


class GroupFailed(Exception):
    """The group could not be made, or an operation on it did not end in time."""


class WeightGroup:
    """A process group whose rank 0 is this process."""

    def __init__(self, group: ProcessGroup, name: str, *, timeout_s: float) -> None:
        self.name = name
        self._group: ProcessGroup | None = group
        self._timeout_s = timeout_s

    @classmethod
    def join(
        cls, store: TCPStore, *, name: str, world_size: int, backend: str, timeout_s: float, check: Callable[[], None]
    ) -> "WeightGroup":
        """Make the group while the engines join. check: called while waiting; what it raises ends the wait."""
        made: list[ProcessGroup] = []
        errors: list[Exception] = []

        def make() -> None:
            try:
                made.append(_make_group(store, name, world_size, backend, timeout_s))
            except Exception as error:  # torch raises many kinds here; the caller gets it below
                errors.append(error)

        thread = threading.Thread(target=make, name="join-weight-group", daemon=True)
        thread.start()
        deadline = time.monotonic() + timeout_s + 1.0
        while thread.is_alive():
            check()
            if time.monotonic() > deadline:
                raise GroupFailed(f"group {name}: not all of {world_size} ranks joined within {timeout_s:g} s")
            thread.join(0.005)
        if errors:
            raise GroupFailed(
                f"group {name}: not all of {world_size} ranks joined within {timeout_s:g} s: {errors[0]}"
            ) from errors[0]
        return cls(made[0], name, timeout_s=timeout_s)

    def broadcast(self, flat: torch.Tensor, *, check: Callable[[], None]) -> None:
        """Send bytes to every engine. check: as in join."""
        assert self._group is not None  # not dropped
        options = distributed_c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        options.timeout = timedelta(seconds=self._timeout_s)
        work = self._group.broadcast([flat], options)
        deadline = time.monotonic() + self._timeout_s + 1.0
        while not work.is_completed():
            check()
            if time.monotonic() > deadline:
                raise GroupFailed(f"group {self.name}: a broadcast did not end within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise GroupFailed(f"group {self.name}: a broadcast failed: {error}") from error

    def drop(self) -> None:
        """Let the group go, in the background: closing one with a stuck operation waits for its time-out.

        The thread alone owns it then, so that nobody else waits for it.
        """
        owned = [self._group]
        self._group = None
        threading.Thread(target=_forget, args=(owned, self.name), name="drop-weight-group", daemon=True).start()


def _make_group(store: TCPStore, name: str, world_size: int, backend: str, timeout_s: float) -> ProcessGroup:
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        0,
        [],
        torch.distributed.Backend(backend),
        PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timedelta(seconds=timeout_s),
    )
    assert isinstance(group, ProcessGroup)  # it is a number only on ranks outside the group
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _forget(owned: list[ProcessGroup | None], name: str) -> None:
    group = owned.pop()
    if group is None:  # dropped before; torch would take None for its default group
        return
    try:
        torch.distributed.destroy_process_group(group)
    except (RuntimeError, ValueError, KeyError) as error:
        log.info("weight_group_not_closed", group=name, reason=str(error)[:200])
