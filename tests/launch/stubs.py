"""Starts a supervised run of stub services and watches it, for tests."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from furlong.launch.lock import read_started
from furlong.launch.supervisor import ECHO_S
from furlong.rundir import RunDir

RUN = Path(__file__).with_name("stub_run.py")
LIMIT_S = 30.0
SERVICES = ("metrics", "router", "rollout")


class StubRun:
    """One run: metrics, router, rollout and trainers, each told by arguments how to behave."""

    def __init__(
        self,
        root: Path,
        *,
        trainers: Sequence[str] = ("",),
        rollout: str = "",
        metrics: str = "",
        router: str = "",
        start_s: float = 20.0,
        drain_s: float = 5.0,
        read: bool = True,
    ) -> None:
        self.run_dir = RunDir(root)
        stubs = {"metrics": metrics.split(), "router": router.split(), "rollout": rollout.split()}
        stubs |= {f"trainer-{rank}": arguments.split() for rank, arguments in enumerate(trainers)}
        given = json.dumps({"stubs": stubs, "start_s": start_s, "drain_s": drain_s})
        self.process = subprocess.Popen([sys.executable, str(RUN), str(root), given], stdout=subprocess.PIPE)
        self.num_ready = len(stubs)
        self.output = ""
        self._read = read

    def wait_for(self, text: str, *, count: int = 1) -> None:
        """Read what it prints until a text stands there so many times."""
        assert self.process.stdout
        deadline = time.monotonic() + LIMIT_S
        while self.output.count(text) < count:
            left = deadline - time.monotonic()
            assert left > 0 and self.process.stdout, f"{text!r} was not printed:\n{self.output}"
            if select.select([self.process.stdout], [], [], left)[0]:
                chunk = os.read(self.process.stdout.fileno(), 65536)
                assert chunk, f"it ended without {text!r}:\n{self.output}"
                self.output += chunk.decode()

    def wait_ready(self) -> "StubRun":
        """Until every service is ready."""
        self.wait_for(" ready at ", count=self.num_ready)
        return self

    def pids(self) -> dict[str, int]:
        """Of everything below the supervisor, engines included."""
        started = read_started(self.run_dir)
        assert started
        pids = {name: child.pid for name, child in started.children.items()}
        engines = self.run_dir.root.glob("*.engine")
        return pids | {path.name: int(path.read_text()) for path in engines}

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def send_again(self, number: signal.Signals) -> None:
        """A second signal, late enough to count as one of its own."""
        threading.Event().wait(ECHO_S + 0.1)
        self.send(number)

    def end(self) -> int:
        """Wait for its end; the exit code. What it printed is in `output`."""
        rest, _ = self.process.communicate(timeout=LIMIT_S)
        self.output += rest.decode()
        return self.process.returncode

    def drain_order(self) -> list[str]:
        """Instances in the order in which they drained."""
        return (self.run_dir.root / "order").read_text().split()


def all_gone(pids: dict[str, int], *, within_s: float = 10.0) -> bool:
    """Whether every process has ended, or does so within a limit."""
    deadline = time.monotonic() + within_s
    while any(_alive(pid) for pid in pids.values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
