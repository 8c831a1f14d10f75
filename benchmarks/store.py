"""A metrics store of a million records: how long the service takes to start on it, and a question to answer.

Prints JSON lines. Limits: SERVING within 3 s of the process's start, also after a kill; one key over 10,000 steps, of
100 keys, within 100 ms, asked of the store and over HTTP. Nothing else should run.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import orjson

from benchmarks.loadclient import record
from furlong import addresses, rpc
from furlong.config import RunConfig
from furlong.config.sections import MetricsSection, RunSection
from furlong.jsonline import NO_SECRETS
from furlong.rundir import RunDir
from services.metrics.intake import RecordsIn
from services.metrics.rows import RowReader
from services.metrics.writer import Writer

LIMIT_START_S = 3.0
LIMIT_QUERY_MS = 100.0
NUM_KEYS = 100
NUM_STEPS = 10_000
BATCH = 256
WAIT_S = 60.0


def fill(path: Path, num_records: int) -> dict[str, object]:
    """The rows, and log lines around them."""
    writer = Writer(path, row_timeout_s=3600.0, secrets=NO_SECRETS, on_death=print)
    writer.start()
    began = time.perf_counter()
    logs = tuple(record(number, 300) for number in range(BATCH))
    first, waiting = 1, []
    for begin in range(0, NUM_STEPS, 8):
        bodies = tuple(metrics(step) for step in range(begin, min(begin + 8, NUM_STEPS)))
        waiting.append(writer.submit(RecordsIn("bench/a", 1, first, bodies)))
        first += len(bodies)
    for begin in range(0, num_records - NUM_STEPS, BATCH):
        waiting.append(writer.submit(RecordsIn("bench/b", 1, 1 + begin, logs)))
        if len(waiting) > 256:
            waiting.pop(0).result(WAIT_S)
    for done in waiting:
        done.result(WAIT_S)
    seconds = time.perf_counter() - began
    writer.close(WAIT_S)
    return {"case": "fill", "seconds": round(seconds, 1), "size_mb": round(path.stat().st_size / 1e6, 1)}


def metrics(step: int) -> bytes:
    """One row's record."""
    values = {f"train/key_{number}": ["last", step + number / 7] for number in range(NUM_KEYS)}
    head = {"event": "metrics", "run": "bench", "axis": "train/step", "step": step, "attempt": 1}
    return orjson.dumps({**head, "part": "a", "parts": ["a"], "values": values})


@contextmanager
def service(folder: Path) -> Iterator[tuple[float, str]]:
    """The seconds until it was SERVING, and its HTTP address."""
    run_dir = RunDir(folder)
    config = folder / "bench.json"
    settings = RunConfig(run=RunSection(name="bench", run_dir=str(folder)), metrics=MetricsSection())
    config.write_text(settings.model_dump_json())
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(config)])
    try:
        while (entry := addresses.find(run_dir, "metrics")) is None or entry.pid != process.pid:
            if time.perf_counter() - began > WAIT_S or process.poll() is not None:
                raise TimeoutError("the service does not start")
            time.sleep(0.01)
        rpc.wait_serving(entry.grpc or "", "furlong.v1.Metrics", timeout_s=WAIT_S, poll_s=0.01)
        yield time.perf_counter() - began, entry.http or ""
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def time_query(ask: Callable[[str], int], times: int) -> float:
    """The middle of so many, in milliseconds."""
    taken = []
    for number in range(times):
        began = time.perf_counter()
        count = ask(f"train/key_{number * 7 % NUM_KEYS}")
        taken.append((time.perf_counter() - began) * 1000)
        if count != NUM_STEPS:
            raise ValueError(f"{count} points, there are {NUM_STEPS}")
    return statistics.median(taken)


def from_store(reader: RowReader, key: str) -> int:
    """The number of points."""
    return len(reader.points("bench", key)[0])


def over_http(address: str, key: str) -> int:
    """The number of points in the answer."""
    with urllib.request.urlopen(f"{address}/api/points?run=bench&key={key}", timeout=WAIT_S) as answer:
        return len(orjson.loads(answer.read())["curves"][0]["steps"])


def main() -> int:
    """0: within every limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-records", type=int, default=1_000_000)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        from services.metrics.main import main as serve_metrics

        return serve_metrics(RunConfig.model_validate_json(options.serve.read_bytes()), rank=0, foreground=False)
    good = True
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder)).create()
        path = run_dir.metrics_store / "metrics.db"
        print(json.dumps(fill(path, options.num_records)), flush=True)
        for case in ("start", "start after a kill"):
            with service(Path(folder)) as (seconds, http):
                good &= seconds <= LIMIT_START_S
                print(json.dumps({"case": case, "seconds": round(seconds, 2), "limit_s": LIMIT_START_S}), flush=True)
                reader = RowReader(path)
                asked = {
                    "one key, 10,000 steps, from the store": partial(from_store, reader),
                    "one key, 10,000 steps, over HTTP": partial(over_http, http),
                }
                for name, ask in asked.items():
                    taken_ms = time_query(ask, 9)
                    good &= taken_ms <= LIMIT_QUERY_MS
                    print(json.dumps({"case": name, "ms": round(taken_ms, 1), "limit_ms": LIMIT_QUERY_MS}), flush=True)
                reader.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
