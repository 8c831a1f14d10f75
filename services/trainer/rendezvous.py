"""How the trainer's ranks find each other: a TCPStore that rank 0 opens on a free port and publishes in the run
directory.

Every wait has a limit. A store of an earlier start is never joined: its owner must be alive, and each rank joins a
store once only.
"""

import os
import time
from dataclasses import dataclass
from datetime import timedelta

import psutil
import structlog
import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from furlong import addresses
from furlong.addresses import NotReachable
from furlong.config import RunConfig
from furlong.rundir import RunDir
from services.trainer.rank_info import RankInfo

log = structlog.get_logger()

STORE = "store"
POLL_S = 0.05


@dataclass(frozen=True)
class Peer:
    """Another rank's process on this host."""

    rank: int
    pid: int
    started: float
    """Start time of the process as the kernel tells it; a reused pid has another."""

    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@dataclass(frozen=True)
class Rendezvous:
    """The ranks, met."""

    info: RankInfo
    store: Store | None
    """For commands. None: one rank needs none."""
    peers: tuple[Peer, ...]
    """All other ranks."""


def pick_device(wanted: str, rank: int) -> torch.device:
    """The device of a rank. auto: cuda if there is one."""
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def open_store(config: RunConfig, run_dir: RunDir) -> TCPStore:
    """Rank 0: listen on a free port. The address still has to be published."""
    limit = timedelta(seconds=config.trainer.distributed_timeout_s)
    return TCPStore(config.run.host, 0, is_master=True, wait_for_workers=False, timeout=limit)


def meet(config: RunConfig, run_dir: RunDir, *, rank: int, own_store: TCPStore | None) -> Rendezvous:
    """Meet all ranks and make torch's default group. Raises NotReachable naming who is missing.

    own_store: rank 0's, already published. None on the other ranks.
    """
    world_size = config.trainer.trainer_num_ranks
    info = RankInfo(rank, world_size, pick_device(config.trainer.trainer_device, rank))
    if world_size == 1 and config.model.dtype == "float32":
        return Rendezvous(info, None, ())
    deadline = time.monotonic() + config.run.start_timeout_s
    store: Store = own_store if own_store is not None else _join(config, run_dir, rank, deadline)
    store.set(f"pid/{rank}", f"{os.getpid()} {psutil.Process().create_time()!r}")
    peers = tuple(_peer(store, other, deadline) for other in range(world_size) if other != rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if info.device.type == "cuda" else "gloo",
        store=PrefixStore("default", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.trainer.distributed_timeout_s),
    )
    log.info("ranks_met", world_size=world_size)
    return Rendezvous(info, store, peers)


def leave() -> None:
    """Take torch's default group down, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _join(config: RunConfig, run_dir: RunDir, rank: int, deadline: float) -> TCPStore:
    """Another rank: find rank 0's store and join it, unless this rank has joined it before."""
    limit = timedelta(seconds=config.trainer.distributed_timeout_s)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NotReachable(f"trainer-0 took no rank {rank} within {config.run.start_timeout_s:g} s")
        entry = addresses.wait_for(run_dir, "trainer-0", timeout_s=left)
        host, _, port = entry.extra.get(STORE, "").rpartition(":")
        if port:
            try:
                store = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=limit)
                if store.add(f"joined/{rank}", 1) == 1:
                    return store
            except (DistError, RuntimeError) as error:  # rank 0 ended just now
                log.info("store_not_joined", address=entry.extra[STORE], reason=str(error)[:200])
        time.sleep(POLL_S)


def _peer(store: Store, rank: int, deadline: float) -> Peer:
    try:
        store.wait([f"pid/{rank}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except (DistError, RuntimeError) as error:
        raise NotReachable(f"trainer-{rank} did not appear in time. Is it started, with the same --run-dir?") from error
    pid, started = store.get(f"pid/{rank}").decode().split()
    return Peer(rank, int(pid), float(started))
