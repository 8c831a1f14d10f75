"""What following files costs and how soon a line is stored. Prints JSON lines.

`backlog`: a file of JSON lines (300 bytes each) and one of text are there when the service starts: lines a second until
all are on disk, and the service's CPU time. Beside it rsyslog's imfile, which copies the same lines into a file without
waiting for the disk, where `make tools` has fetched it. `delay`: one line is written at a time; milliseconds until it
can be read in the store.
"""

import argparse
import json
import multiprocessing
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from furlong import addresses
from furlong.config import RunConfig
from furlong.config.sections import MetricsSection, RunSection
from furlong.rundir import RunDir

START_LIMIT_S = 30.0
LIMIT_S = 300.0


def serve(config_json: str) -> None:
    """The metrics service, in its own process."""
    from services.metrics.main import main

    sys.exit(main(RunConfig.model_validate_json(config_json), rank=0, foreground=False))


@contextmanager
def service(root: Path, *tail: Path) -> Iterator[tuple[psutil.Process, Path]]:
    """The process of a service that serves, and its store."""
    run_dir = RunDir(root / "run").create()
    metrics = MetricsSection(tail=tuple(map(str, tail)))
    config = RunConfig(run=RunSection(name="bench", run_dir=str(run_dir.root)), metrics=metrics)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(config.model_dump_json(),))
    process.start()
    try:
        addresses.wait_for(run_dir, "metrics", timeout_s=START_LIMIT_S)
        yield psutil.Process(process.pid), run_dir.metrics_store / "metrics.db"
    finally:
        process.terminate()
        process.join(20)
        process.kill()


def num_stored(connection: sqlite3.Connection) -> int:
    """Records of followed files that are on disk."""
    find = (
        "SELECT coalesce(sum(num_records), 0) FROM batches b JOIN producers p ON p.id = b.producer_id"
        " WHERE producer = ?"
    )
    return int(connection.execute(find, ("bench/tail",)).fetchone()[0])


def json_line(number: int) -> bytes:
    """300 bytes."""
    head = b'{"ts":"2026-11-29T17:03:41.123456Z","level":"info","event":"step","service":"job","n":%d,"text":"' % number
    return head + b"x" * (297 - len(head)) + b'"}\n'


def text_line(number: int) -> bytes:
    """As SGLang prints them."""
    return b"[2026-11-29 17:03:41 TP0] Ready with request number %08d of the batch, nothing else to say\n" % number


def backlog(kind: str, num_lines: int) -> dict[str, object]:
    """From the start of the service until everything is on disk."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "app.log"
        make = json_line if kind == "json" else text_line
        with log.open("wb") as file:
            for number in range(num_lines):
                file.write(make(number))
        size = log.stat().st_size
        log.rename(hidden := log.with_name("hidden"))
        with service(Path(folder), log) as (process, store):
            connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
            cpu, began = sum(process.cpu_times()[:2]), time.monotonic()
            hidden.rename(log)
            while num_stored(connection) < num_lines and time.monotonic() < began + LIMIT_S:
                time.sleep(0.02)
            took_s, cpu_s = time.monotonic() - began, sum(process.cpu_times()[:2]) - cpu
            connection.close()
            memory_mb = process.memory_info().rss / 1e6
    return {
        "bench": "tailing",
        "what": f"backlog of {kind} lines",
        "lines_per_s": round(num_lines / took_s),
        "mb_per_s": round(size / took_s / 1e6, 1),
        "cpu_share": round(cpu_s / took_s, 2),
        "memory_mb": round(memory_mb),
    }


def delays(num_lines: int) -> dict[str, object]:
    """From the write of one line until it is on disk."""
    found_ms = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "app.log"
        log.touch()
        with service(Path(folder), log) as (_, store), log.open("ab", buffering=0) as file:
            connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
            for number in range(num_lines):
                time.sleep(0.03 * (number % 7))  # at any moment of the poll
                began = time.monotonic()
                file.write(text_line(number))
                while num_stored(connection) <= number and time.monotonic() < began + LIMIT_S:
                    time.sleep(0.002)
                found_ms.append((time.monotonic() - began) * 1000)
            connection.close()
    found_ms.sort()
    return {
        "bench": "tailing",
        "what": "delay from write to disk",
        "median_ms": round(statistics.median(found_ms)),
        "p99_ms": round(found_ms[int(len(found_ms) * 0.99)]),
    }


def rsyslog(num_lines: int) -> dict[str, object] | None:
    """The same JSON lines through rsyslog's imfile into a file. None: it is not here."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests import tools

    tool = tools.find("rsyslog")
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        log, out, config = (Path(folder) / name for name in ("app.log", "out", "rsyslog.conf"))
        with log.open("wb") as file:
            for number in range(num_lines):
                file.write(json_line(number))
        size = log.stat().st_size
        config.write_text(
            f'global(workDirectory="{folder}")\nmodule(load="imfile" mode="inotify")\n'
            'template(name="raw" type="string" string="%msg%\\n")\n'
            f'input(type="imfile" file="{log}" tag="t" reopenOnTruncate="on")\n'
            f'action(type="omfile" file="{out}" template="raw")\n'
        )
        command = [*tool.command, "-n", "-f", str(config), "-i", f"{folder}/pid"]
        began = time.monotonic()
        process = subprocess.Popen(command, env=tool.environment, stderr=subprocess.DEVNULL)
        try:
            while (not out.exists() or out.stat().st_size < size) and time.monotonic() < began + LIMIT_S:
                time.sleep(0.02)
            took_s = time.monotonic() - began
            cpu_s = sum(psutil.Process(process.pid).cpu_times()[:2])
        finally:
            process.terminate()
            process.wait(20)
    return {
        "bench": "tailing",
        "what": "rsyslog imfile to a file, never synced",
        "lines_per_s": round(num_lines / took_s),
        "cpu_share": round(cpu_s / took_s, 2),
    }


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--delays", type=int, default=100)
    given = parser.parse_args()
    for kind in ("json", "text"):
        print(json.dumps(backlog(kind, given.lines)), flush=True)
    other = rsyslog(given.lines)
    if other is not None:
        print(json.dumps(other), flush=True)
    print(json.dumps(delays(given.delays)), flush=True)


if __name__ == "__main__":
    main()
