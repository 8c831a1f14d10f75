"""One trainer rank as a process of its own: `python -m tests.trainer.rank_process CONFIG RANK`."""

import os
import subprocess
import sys
from pathlib import Path

from furlong.config import RunConfig, load_resolved, to_toml

ROOT = Path(__file__).parents[2]


def start(config: RunConfig, rank: int) -> "subprocess.Popen[str]":
    """Start a rank; its stdout is a pipe."""
    path = Path(config.run.run_dir).parent / "config.toml"
    if not path.exists():
        path.write_text(to_toml(config))
    command = [sys.executable, "-m", "tests.trainer.rank_process", str(path), str(rank)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )


def end(*processes: "subprocess.Popen[str]", timeout_s: float = 60.0) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each, once all have ended; kills what does not end in time."""
    ended = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=timeout_s)
            ended.append((process.returncode, output, errors))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ended


if __name__ == "__main__":
    from services.trainer.main import main

    sys.exit(main(load_resolved(Path(sys.argv[1])), rank=int(sys.argv[2]), foreground=False))
