"""The collective groups over which a trainer sends weights.

It owns joining, receiving and closing, each with a limit. The wire is SGLang's: a TCP store opened by rank 0, a
prefix of the group's name, a gloo group beside torch's default one, one broadcast a tensor or one a bucket. It must
never leave a dead trainer's group in the way of the next one: a new join under the same name closes the old group.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from furlong.addresses import join_host_port
from services.rollout.engine.weights import TensorSpec, UpdateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CONNECT_RETRY_S = 0.1


class GroupError(UpdateError):
    """A group broke while it was used; it must be made again."""


@dataclass(frozen=True)
class GroupAddress:
    """Where and as whom to join."""

    host: str
    port: int
    rank: int
    world_size: int
    name: str

    def check(self, backend: str) -> None:
        """UpdateError if these cannot be a group."""
        if backend != "gloo":
            raise UpdateError(f"backend must be 'gloo' on the CPU engine, got {backend!r}")
        if not 1 <= self.rank < self.world_size:
            raise UpdateError(
                f"rank_offset must be >= 1 and < world_size, got {self.rank} and {self.world_size}; "
                "rank 0 is the trainer"
            )
        if not 0 < self.port < 65536:
            raise UpdateError(f"master_port must be in 1..65535, got {self.port}")


class WeightsGroup:
    """A joined group; rank 0 sends."""

    def __init__(self, handle: ProcessGroup, address: GroupAddress) -> None:
        self.address = address
        self._handle = handle

    def receive(self, tensor: Tensor, timeout_s: float) -> None:
        """Wait for rank 0's next broadcast; UpdateError when it fails or is late."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        try:
            work = self._handle.broadcast([tensor], options)
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise GroupError(
                f"group {self.address.name!r}: rank 0 stopped sending or was late by more than {timeout_s:.1f} s "
                f"({_first_line(error)})"
            ) from error

    def close(self) -> None:
        """Close the sockets; the other side's pending operations fail."""
        import torch.distributed as dist

        dist.destroy_process_group(self._handle)


class GroupRegistry:
    """Groups by name."""

    def __init__(self) -> None:
        self._groups: dict[str, WeightsGroup] = {}
        self._tickets: dict[str, object] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Names of the groups that stand."""
        return list(self._groups)

    def join(self, address: GroupAddress, timeout_s: float) -> None:
        """Join a group, closing one of the same name first; blocks up to timeout_s."""
        ticket = object()
        with self._lock:
            self._tickets[address.name] = ticket
            stale = self._groups.pop(address.name, None)
        if stale is not None:
            stale.close()
        group = _join(address, timeout_s)
        with self._lock:
            current = self._tickets.get(address.name) is ticket
            if current:
                self._groups[address.name] = group
        if not current:
            group.close()
            raise UpdateError(f"group {address.name!r} was initialised again while this call was waiting")

    def get(self, name: str) -> WeightsGroup:
        """Return a group or say which there are."""
        group = self._groups.get(name)
        if group is None:
            raise UpdateError(
                f"Failed to receive weights: Group {name} not in {self.names()}. "
                "Please call `init_weights_update_group` first."
            )
        return group

    def discard(self, group: WeightsGroup) -> None:
        """Close a group that has failed."""
        with self._lock:
            if self._groups.get(group.address.name) is group:
                del self._groups[group.address.name]
        group.close()

    def destroy(self, name: str) -> None:
        """Close a group by name; UpdateError if there is none."""
        with self._lock:
            group = self._groups.pop(name, None)
        if group is None:
            raise UpdateError("The group to be destroyed does not exist.")
        group.close()


def receive_tensors(
    group: WeightsGroup, specs: Sequence[TensorSpec], *, flattened: bool, timeout_s: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the announced tensors as they come; the whole call has `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    if flattened:
        yield from _receive_bucket(group, specs, timeout_s)
        return
    for spec in specs:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        group.receive(tensor, max(deadline - time.monotonic(), 0.001))
        yield spec.name, tensor


def _receive_bucket(group: WeightsGroup, specs: Sequence[TensorSpec], timeout_s: float) -> Iterator[tuple[str, Tensor]]:
    sizes = [torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    group.receive(flat, timeout_s)
    for spec, part in zip(specs, flat.split(sizes), strict=True):
        yield spec.name, _view_as(part, spec)


def _view_as(part: Tensor, spec: TensorSpec) -> Tensor:
    if part.storage_offset() % spec.dtype.itemsize:
        part = part.clone()
    return part.view(spec.dtype).view(spec.shape)


def _join(address: GroupAddress, timeout_s: float) -> WeightsGroup:
    from torch.distributed import PrefixStore, rendezvous
    from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

    deadline = time.monotonic() + timeout_s
    where = join_host_port(address.host, address.port)
    _await_store(address, deadline, timeout_s)
    try:
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        url = f"tcp://{where}"
        store, rank, world_size = next(iter(rendezvous(url, address.rank, address.world_size, timeout=left)))
        store.set_timeout(left)
        handle, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend("gloo"),
            PrefixStore(address.name, store),
            group_name=GroupName(address.name),
            timeout=left,
        )
    except (RuntimeError, ValueError) as error:
        others = [rank for rank in range(address.world_size) if rank != address.rank]
        raise UpdateError(
            f"Failed to initialize custom process group {address.name!r}: the store at {where} answers, but not all "
            f"of ranks {others} joined within {timeout_s:g} s ({_first_line(error)})"
        ) from error
    group = cast("ProcessGroup", handle)
    _world.pg_group_ranks[group] = {member: member for member in range(address.world_size)}  # closing looks there
    return WeightsGroup(group, address)


def _await_store(address: GroupAddress, deadline: float, timeout_s: float) -> None:
    """Wait until something listens at the store's address, so that a missing trainer has a name of its own."""
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((address.host, address.port), timeout=max(left, 0.001)):
                return
        except OSError as error:
            if deadline - time.monotonic() <= CONNECT_RETRY_S:
                raise UpdateError(
                    f"Failed to initialize custom process group {address.name!r}: rank 0 (the trainer) did not open "
                    f"its store at {address.host}:{address.port} within {timeout_s:g} s ({error})"
                ) from error
            time.sleep(CONNECT_RETRY_S)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
