"""What a log call costs its caller. Prints JSON lines: median and p99, and the median's limit.

One `log.info` with six fields, to a file and to the telemetry queue, with the metrics service up, stopped (SIGSTOP) and
dead; then how fast the service takes records. The service is a process of its own; nothing else should run.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from furlong import addresses, logs
from furlong.config import RunConfig
from furlong.config.sections import MetricsSection, RunSection
from furlong.rundir import RunDir
from furlong.telemetry import Telemetry

LIMIT_MEDIAN_US = 25.0
START_LIMIT_S = 30.0

log = structlog.get_logger()


def serve(config_json: str) -> None:
    """The metrics service, in its own process."""
    from services.metrics.main import main

    sys.exit(main(RunConfig.model_validate_json(config_json), rank=0, foreground=False))


@contextmanager
def service(config: RunConfig, run_dir: RunDir) -> Iterator[int]:
    """The pid of a service that serves."""
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(config.model_dump_json(),))
    process.start()
    try:
        addresses.wait_for(run_dir, "metrics", timeout_s=START_LIMIT_S)
        yield process.pid or 0
    finally:
        process.kill()
        process.join()


def time_calls(num_calls: int, pause_s: float) -> list[float]:
    """Microseconds of each call. pause_s: between bursts of 100, so that queues do not fill."""
    taken = []
    for number in range(num_calls):
        began = time.perf_counter_ns()
        log.info(
            "weights_published",
            policy_version=number,
            seconds=2.125,
            mode="broadcast",
            verified=True,
            num_engines=2,
            size_bytes=123_456_789,
        )
        taken.append((time.perf_counter_ns() - began) / 1000)
        if number % 100 == 99:
            time.sleep(pause_s)
    return sorted(taken)


def report(case: str, taken: list[float]) -> bool:
    """Print one line; whether the median is within its limit."""
    median, p99 = taken[len(taken) // 2], taken[int(len(taken) * 0.99)]
    result = {
        "case": case,
        "median_us": round(median, 2),
        "p99_us": round(p99, 2),
        "limit_us": LIMIT_MEDIAN_US,
        "median_to_limit": round(median / LIMIT_MEDIAN_US, 3),
        "num_calls": len(taken),
    }
    print(json.dumps(result), flush=True)
    return median <= LIMIT_MEDIAN_US


def throughput(telemetry: Telemetry, num_records: int) -> None:
    """Records a second from the queue to the service's disk."""
    line = b'{"ts":"2026-01-01T00:00:00.000000Z","level":"info","event":"x","text":"' + b"y" * 200 + b'"}'
    began = time.perf_counter()
    for number in range(num_records):
        telemetry.ship(line, 20)
        if number % 4000 == 3999:
            telemetry.flush(30.0)
    telemetry.flush(30.0)
    rate = num_records / (time.perf_counter() - began)
    print(json.dumps({"case": "records to disk", "records_per_s": round(rate), "num_records": num_records}), flush=True)


def main() -> int:
    """0: every median is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-calls", type=int, default=20_000)
    parser.add_argument("--pause-s", type=float, default=0.002)
    options = parser.parse_args()
    good = []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder)).create()
        config = RunConfig(run=RunSection(name="bench", run_dir=folder), metrics=MetricsSection())
        with service(config, run_dir) as pid:
            telemetry = Telemetry.for_run(config, run_dir, service="bench", instance="bench-0")
            path = run_dir.log("bench-0")
            logs.configure(run="bench", service="bench", instance="bench-0", path=path, telemetry=telemetry)
            telemetry.flush(10.0)
            good.append(report("service up", time_calls(options.num_calls, options.pause_s)))
            throughput(telemetry, 100_000)
            os.kill(pid, signal.SIGSTOP)
            good.append(report("service stopped", time_calls(options.num_calls, options.pause_s)))
        good.append(report("service dead", time_calls(options.num_calls, options.pause_s)))
        print(json.dumps({"case": "after", "dropped": telemetry.stats.num_dropped}), flush=True)
        telemetry.close(1.0)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
