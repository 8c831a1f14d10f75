"""A service that was started alone, as a person starts it, for tests."""

import signal
import subprocess
import sys
from pathlib import Path

from furlong.addresses import find
from furlong.rundir import RunDir
from tests.metrics.running import until


class Alone:
    """One service, its stderr in a file."""

    def __init__(self, folder: Path, *flags: str, port: int = 0, service: str = "metrics") -> None:
        self.folder, self.stderr, self.service = folder, folder.with_suffix(".err"), service
        command = [sys.executable, "-m", "furlong", service, "--port", str(port), "--dir", str(folder), *flags]
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)
        until(lambda: "serves" in self.said() or self.process.poll() is not None, "the service's first line")

    def said(self) -> str:
        return self.stderr.read_text()

    @property
    def http(self) -> str:
        return next(word for word in self.said().split() if word.startswith(("http://", "https://")))

    @property
    def grpc(self) -> str:
        entry = find(RunDir(self.folder), self.service)
        assert entry is not None and entry.grpc is not None
        return entry.grpc

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(20)
