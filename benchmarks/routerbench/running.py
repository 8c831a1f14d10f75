"""Processes of the benchmark: started on the processors they may use, watched, ended by pid with their children.

Must never end a process that was not started here.
"""

import contextlib
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

END_LIMIT_S = 3.0
MIB = 1024 * 1024


@dataclass(frozen=True)
class Cpus:
    """Who runs where."""

    router: frozenset[int]
    load: frozenset[int]

    @property
    def apart(self) -> bool:
        """Whether the router has a processor that the load does not touch."""
        return not self.router & self.load


def share_out_cpus() -> Cpus:
    """The first processor for the router, the others for load and workers; one processor is shared."""
    mine = sorted(os.sched_getaffinity(0))
    return Cpus(frozenset(mine[:1]), frozenset(mine[1:] or mine))


def raise_file_limit() -> None:
    """Ten thousand connections have an end here and one in the router, which inherits the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    cpus: frozenset[int],
    log: Path,
    environment: Mapping[str, str] | None = None,
    by: signal.Signals = signal.SIGTERM,
) -> Generator[subprocess.Popen[str]]:
    """A process while inside. Its stdout can be read; what it says on stderr goes to `log`. by: what ends it."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
    try:
        yield process
    finally:
        end(process, by=by)


def end(process: subprocess.Popen[str], *, by: signal.Signals = signal.SIGTERM) -> None:
    """With its children; asked first, if `by` is a question."""
    family = [one for one in family_of(process.pid) if one.pid != process.pid]
    for one in (process, *family):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(by)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT_S)
    for one in (process, *family):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(END_LIMIT_S)
    if process.stdout:
        process.stdout.close()


def family_of(pid: int) -> list[psutil.Process]:
    """The process and its descendants."""
    try:
        one = psutil.Process(pid)
        return [one, *one.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pid: int) -> dict[int, float]:
    """Processor seconds of each process of a family, by pid; to the nanosecond where the kernel tells."""
    tasks = {one.pid: Path(f"/proc/{one.pid}/task").glob("*") for one in family_of(pid)}
    return {one: sum(map(_thread_s, threads)) for one, threads in tasks.items()}


def _thread_s(thread: Path) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    return 0.0


def rss_mib(pid: int, *, peak: bool = False) -> float:
    """Memory of a family; peak: since `forget_peak`, or since the start."""
    return sum(_status_kib(one.pid, "VmHWM" if peak else "VmRSS") for one in family_of(pid)) / 1024


def forget_peak(pid: int) -> None:
    """Let the peak begin at what is used now."""
    for one in family_of(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{one.pid}/clear_refs").write_text("5")


def _status_kib(pid: int, key: str) -> int:
    with contextlib.suppress(OSError):
        found = re.search(rf"{key}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) if found else 0
    return 0


def until(deadline: float) -> bool:
    """Waits a moment; False once time.monotonic() is past the deadline."""
    time.sleep(0.005)
    return time.monotonic() < deadline
