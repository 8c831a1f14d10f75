"""The run directory: where everything that a run writes has its place. Knows paths, and how to write atomically.

config.toml        the resolved run, no secrets
addresses.json     service instance -> grpc and http address, pid, start time
logs/INSTANCE.jsonl, logs/INSTANCE.out: its log, and what its process wrote to stdout and stderr
up.json            what `furlong up` started: instance -> pid
metrics.jsonl      one line a row: run, axis, step, values
alerts.jsonl       one line an alert that began or ceased to fire
checkpoints/       one folder a complete checkpoint
metrics/           the metrics service's durable log
spool/             records that the metrics service has not acknowledged yet
rollout/           batches kept since the last checkpoint
router/            the workers that are registered with the router
traces/            the profiler's traces, if asked for
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from furlong.config import ConfigError
from furlong.config.errors import Problem


@dataclass(frozen=True)
class RunDir:
    """Paths within one run directory."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def addresses(self) -> Path:
        return self.root / "addresses.json"

    @property
    def metrics_rows(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def alerts(self) -> Path:
        return self.root / "alerts.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics_store(self) -> Path:
        return self.root / "metrics"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def router_state(self) -> Path:
        return self.root / "router" / "workers.json"

    @property
    def rollout_store(self) -> Path:
        return self.root / "rollout"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    def log(self, instance: str) -> Path:
        """The JSON-lines log of one instance, for example `trainer-0`."""
        return self.root / "logs" / f"{instance}.jsonl"

    def create(self, *, alone: str = "") -> "RunDir":
        """Make the folders. Raises ConfigError when the place cannot be written.

        alone: the service of no run that works here. Empty: a run's.
        """
        own = {"metrics": self.metrics_store, "router": self.router_state.parent}
        stores = [own[alone]] if alone else [*own.values(), self.checkpoints, self.rollout_store]
        try:
            for folder in (self.log("x").parent, self.spool, *stores):
                folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            rule = f"must be a folder that can be written: {error.strerror}"
            key, flag = ("--dir", "--dir") if alone else ("run.run_dir", "--run-dir")
            remedy = f"Give another {flag}, or mend its permissions."
            raise ConfigError([Problem(key, str(self.root), rule, remedy)]) from error
        return self


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace the file's content: a reader sees the old or the new, also after a crash or a power cut."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, mode)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
