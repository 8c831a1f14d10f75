"""Who listens where: `addresses.json` in the run directory, written by each service, read by all.

A service publishes itself once its sockets listen, and withdraws at its end. Entries of dead processes are never used:
an entry counts only while its process, recognised by pid and start time, is alive on this host.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import orjson
import psutil
import structlog
from pydantic import Field, TypeAdapter, ValidationError

from furlong.rundir import RunDir, write_atomically

log = structlog.get_logger()


class PortTaken(Exception):
    """The address to listen on cannot be had."""


class NotReachable(Exception):
    """A service was waited for and did not appear in time."""


@dataclass(frozen=True)
class Address:
    """Where one service instance listens."""

    instance: str
    """For example `rollout` or `trainer-0`."""
    pid: Annotated[int, Field(ge=1, lt=2**31)]
    grpc: str | None = None
    """`HOST:PORT`, IPv6 hosts in brackets."""
    http: str | None = None
    """Base address, `http://HOST:PORT`."""
    process_started: float = 0.0
    """The process's start time, seconds since the epoch, as the kernel tells it."""
    published: float = 0.0
    """When the entry was written, seconds since the epoch."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """What only this service has, for example the trainer's rendezvous `store`."""
    start_ticks: int = 0
    """The process's start time in clock ticks since the host started: unlike `process_started` it does not move when
    the host's clock is set. 0: the kernel does not tell."""

    def alive(self) -> bool:
        """Whether the process that wrote this entry still runs on this host."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:  # killed, and its parent has not looked yet
                return False
            if self.start_ticks:
                return _start_ticks(self.pid) == self.start_ticks
            return abs(process.create_time() - self.process_started) < 1.0
        except psutil.Error:
            return False


_ENTRY = TypeAdapter(Address)


def join_host_port(host: str, port: int) -> str:
    """`HOST:PORT` with brackets around an IPv6 host."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def publish(
    run_dir: RunDir,
    instance: str,
    *,
    grpc: str | None = None,
    http: str | None = None,
    extra: Mapping[str, str] | None = None,
) -> Address:
    """Write this process's entry, replacing an older one of the same instance."""
    started = psutil.Process(os.getpid()).create_time()
    entry = Address(
        instance, os.getpid(), grpc, http, started, time.time(), dict(extra or {}), _start_ticks(os.getpid())
    )
    with _locked(run_dir):
        entries = _read(run_dir, tell=True)
        entries[instance] = entry
        _write(run_dir, entries)
    return entry


def withdraw(run_dir: RunDir, instance: str) -> None:
    """Remove this process's entry. An entry that another process wrote meanwhile stays."""
    with _locked(run_dir):
        entries = _read(run_dir)
        if instance in entries and entries[instance].pid == os.getpid():
            del entries[instance]
            _write(run_dir, entries)


def read_addresses(run_dir: RunDir) -> dict[str, Address]:
    """All entries, of dead processes too (see `Address.alive`). A missing file is no entries."""
    return _read(run_dir)


def find(run_dir: RunDir, instance: str) -> Address | None:
    """The live entry of an instance, if there is one."""
    entry = _read(run_dir).get(instance)
    return entry if entry and entry.alive() else None


def wait_for(run_dir: RunDir, instance: str, *, timeout_s: float, poll_s: float = 0.05) -> Address:
    """Wait until an instance has published itself. Raises NotReachable naming what was waited for and how long."""
    deadline = time.monotonic() + timeout_s
    while (entry := find(run_dir, instance)) is None:
        if time.monotonic() > deadline:
            raise NotReachable(
                f"{instance} did not appear in {run_dir.addresses} within {timeout_s:g} s. "
                f"Is it started, with the same --run-dir? Its log: {run_dir.log(instance)}. "
                "The limit is --start-timeout-s."
            )
        time.sleep(poll_s)
    return entry


def _start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat; 0 where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[19])


@contextlib.contextmanager
def _locked(run_dir: RunDir) -> Generator[None]:
    """One writer at a time. The kernel releases the lock of a killed process."""
    with open(run_dir.root / ".addresses.lock", "w") as lock:
        deadline = time.monotonic() + 10.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NotReachable(f"{lock.name} is held by another process for 10 s") from None
                time.sleep(0.01)
        yield


def _read(run_dir: RunDir, *, tell: bool = False) -> dict[str, Address]:
    """What stands there and is whole. A damaged file or entry counts as none: each service writes its own anew.

    tell: log that something is damaged. Who polls does not.
    """
    try:
        tree = orjson.loads(run_dir.addresses.read_bytes())
    except FileNotFoundError:
        return {}
    except orjson.JSONDecodeError:
        tree = None
    items = tree if isinstance(tree, dict) else {}
    entries = {name: entry for name, item in items.items() if (entry := _entry(name, item)) is not None}
    if tell and (items is not tree or len(entries) < len(items)):
        log.warning("addresses_damaged", path=str(run_dir.addresses), kept=sorted(entries))
    return entries


def _entry(instance: str, item: object) -> Address | None:
    """One entry as it was published; None when it is not one."""
    try:
        return _ENTRY.validate_python({**item, "instance": instance}) if isinstance(item, dict) else None
    except ValidationError:
        return None


def _write(run_dir: RunDir, entries: Mapping[str, Address]) -> None:
    tree = {name: {k: v for k, v in asdict(entry).items() if k != "instance"} for name, entry in entries.items()}
    write_atomically(run_dir.addresses, orjson.dumps(tree, option=orjson.OPT_INDENT_2) + b"\n")


def find_metrics(run_dir: RunDir, metrics_addr: str) -> str | None:
    """gRPC address of a run's metrics service as of now: as given, else as published. None: there is none yet."""
    if metrics_addr:
        return metrics_addr
    try:
        entry = find(run_dir, "metrics")
    except (OSError, ValueError, TypeError):  # a file that somebody else damaged
        return None
    return entry.grpc if entry else None
