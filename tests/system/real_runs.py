"""Runs of the real services by `furlong up`, and what is read from them, for tests."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from furlong.launch.checkpoints import newest_checkpoint
from furlong.launch.rows import Row, read_rows
from furlong.launch.supervisor import ECHO_S
from furlong.rundir import RunDir
from tests.processes import left_after

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("small.toml")
LIMIT_S = 90.0
TIMES = ("perf/",)
"""Metrics that tell how long things took: they differ between two runs that are otherwise the same."""
EVAL_PROMPTS = 16


class Up:
    """One `furlong up`, with its output in files."""

    def __init__(
        self, root: Path, *flags: str, environment: Mapping[str, str] | None = None, config: Path | None = None
    ) -> None:
        """config: another than that of small runs."""
        self.run_dir = RunDir(root / "run")
        self._stdout, self._stderr = root / "stdout", root / "stderr"
        command = [sys.executable, "-m", "furlong", "up", "--config", str(config or small_config(root))]
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(self.run_dir.root), *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **(environment or {})},
                cwd=ROOT,
            )
        self.seen: dict[int, psutil.Process] = {}
        """Every process below it that was looked at, by pid."""
        self.command_lines: set[str] = set()

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    def wait_for(self, text: str, *, limit_s: float = LIMIT_S) -> "Up":
        """Until it has printed a text; looks at the processes below it then."""
        deadline = time.monotonic() + limit_s
        while text not in self.stdout:
            ended = self.process.poll()
            assert ended is None, f"it ended with {ended} before {text!r}:\n{self.told()}"
            assert time.monotonic() < deadline, f"{text!r} was not printed within {limit_s} s:\n{self.told()}"
            time.sleep(0.02)
        self.look()
        return self

    def look(self) -> dict[int, psutil.Process]:
        """Remember the processes below it."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        for process in found:
            try:
                self.command_lines.add(" ".join(process.cmdline()))
                self.seen[process.pid] = process
            except psutil.Error:  # it has ended meanwhile
                continue
        return self.seen

    def send(self, number: signal.Signals) -> "Up":
        self.process.send_signal(number)
        return self

    def send_again(self, number: signal.Signals) -> "Up":
        """A second signal, late enough to count as one of its own."""
        threading.Event().wait(ECHO_S + 0.1)
        return self.send(number)

    def end(self, *, limit_s: float = LIMIT_S) -> int:
        """Wait for its end; the exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still ran after {limit_s} s:\n{self.told()}") from None

    def left_running(self, *, within_s: float) -> list[str]:
        """The processes that were seen below it and still run after a limit."""
        return [str(process) for process in left_after(self.seen.values(), within_s=within_s)]

    def kill(self) -> None:
        """End it at once, whatever it does; what is below it dies with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def told(self) -> str:
        """What it printed, for a failed test."""
        return f"--- stdout\n{self.stdout[-6000:]}\n--- stderr\n{self.stderr[-6000:]}"


def small_config(root: Path) -> Path:
    """The small run's TOML with an evaluation set of a few prompts."""
    lines = (ROOT / "examples/arithmetic/eval.jsonl").read_text().splitlines()[:EVAL_PROMPTS]
    (root / "eval.jsonl").write_text("\n".join(lines) + "\n")
    path = root / "small.toml"
    path.write_text(CONFIG.read_text().replace('"EVAL"', f'"{root}/eval.jsonl"'))
    return path


def values(run_dir: RunDir) -> dict[tuple[str, int], dict[str, float | str]]:
    """The rows of a run by (axis, step), times left out; so are those of the router, whose steps are times."""
    rows = [row for row in read_rows(run_dir.metrics_rows) if row.axis != "router/time"]
    return {(row.axis, row.step): untimed(row) for row in rows}


def untimed(row: Row) -> dict[str, float | str]:
    return {name: value for name, value in row.values.items() if not name.startswith(TIMES)}


def final_weights(run_dir: RunDir) -> str:
    """Digest of the weights in the newest checkpoint."""
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None, f"no checkpoint in {run_dir.checkpoints}"
    digest = hashlib.blake2b()
    for path in sorted((checkpoint.path / "hf").glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
