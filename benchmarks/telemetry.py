"""What recording costs its caller. Prints JSON lines: median and 99th percentile of a call, and their limits.

Two calls are timed: one `log.info` with six fields, to a file and to the telemetry queue, and one `Telemetry.metrics`
with 30 values. Each with the metrics service up, while it is flooded by this same process, stopped (SIGSTOP), dead, and
dead with no room left for the spool. The service is a process of its own; nothing else should run. The shipper's thread
works beside the caller: `bursts` says how the calls come (100 in a row, then a pause), `flood` has no pauses at all.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import structlog

from furlong import addresses, logs, records
from furlong.config import RunConfig
from furlong.config.sections import MetricsSection, RunSection
from furlong.rundir import RunDir
from furlong.telemetry import Telemetry

LIMIT_MEDIAN_US = 15.0
LIMIT_P99_US = 100.0
START_LIMIT_S = 30.0
BURST = 100
VALUES: dict[str, records.Value] = {
    f"train/value_{number}": records.Mean(number * 0.37, 3) if number % 3 else records.Last(number * 0.11)
    for number in range(30)
}

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


@contextmanager
def full_disk(folder: Path) -> Iterator[bool]:
    """A spool folder on a file system with no room; whether one could be mounted."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        yield False
        return
    try:
        (folder / "filler").write_bytes(b"x" * 48 * 1024)
        yield True
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False)


def log_call(number: int) -> None:
    """A line with six fields."""
    log.info(
        "weights_published",
        policy_version=number,
        seconds=2.125,
        mode="broadcast",
        verified=True,
        num_engines=2,
        size_bytes=123_456_789,
    )


def metrics_call(telemetry: Telemetry) -> Callable[[int], None]:
    """A row's part with 30 values."""
    return lambda number: telemetry.metrics("train/step", number, VALUES, part="t", parts=["t"], rollout_id=number)


def time_calls(call: Callable[[int], None], num_calls: int, pause_s: float) -> list[float]:
    """Microseconds of each call, ascending. pause_s: between bursts, as work lies between the calls of a service."""
    taken = []
    clock = time.perf_counter_ns
    for number in range(num_calls):
        began = clock()
        call(number)
        taken.append((clock() - began) / 1000)
        if pause_s and number % BURST == BURST - 1:
            time.sleep(pause_s)
    return sorted(taken)


def report(state: str, what: str, taken: list[float]) -> bool:
    """Print one line; whether both figures are within their limits."""
    median, p99 = taken[len(taken) // 2], taken[int(len(taken) * 0.99)]
    result = {
        "case": f"{what}, {state}",
        "median_us": round(median, 2),
        "median_to_limit": round(median / LIMIT_MEDIAN_US, 3),
        "p99_us": round(p99, 2),
        "p99_to_limit": round(p99 / LIMIT_P99_US, 3),
        "max_us": round(taken[-1]),
        "num_calls": len(taken),
    }
    print(json.dumps(result), flush=True)
    return median <= LIMIT_MEDIAN_US and p99 <= LIMIT_P99_US


class Bench:
    """The cases, one after another, in one process as a service has it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.good = True
        self._options = options

    def both(self, state: str, telemetry: Telemetry) -> None:
        """Bursts of both calls."""
        count, pause_s = self._options.num_calls, self._options.pause_s
        for what, call in (("log", log_call), ("metrics", metrics_call(telemetry))):
            self.good &= report(state, what, time_calls(call, count, pause_s))

    def flood(self, state: str, telemetry: Telemetry) -> None:
        """Without pauses: the queue fills, and the oldest lines go."""
        self.good &= report(f"flood, {state}", "log", time_calls(log_call, self._options.num_flood, 0.0))
        print(json.dumps({"case": f"after the flood, {state}", "dropped": telemetry.stats.num_dropped}), flush=True)

    def throughput(self, telemetry: Telemetry, num_records: int = 100_000) -> None:
        """Records a second from the queue to the service's disk."""
        line = b'{"ts":"2026-01-01T00:00:00.000000Z","level":"info","event":"x","text":"' + b"y" * 200 + b'"}'
        began = time.perf_counter()
        for number in range(num_records):
            telemetry.ship(line, 20)
            if number % 4000 == 3999:
                telemetry.flush(30.0)
        telemetry.flush(30.0)
        rate = round(num_records / (time.perf_counter() - began))
        print(json.dumps({"case": "records to disk", "records_per_s": rate, "num_records": num_records}), flush=True)

    def run(self, run_dir: RunDir, config: RunConfig) -> None:
        telemetry = Telemetry.for_run(config, run_dir, service="bench", instance="bench-0")
        path = run_dir.log("bench-0")
        logs.configure(run="bench", service="bench", instance="bench-0", path=path, telemetry=telemetry)
        with service(config, run_dir) as pid:
            telemetry.flush(10.0)
            self.both("service up", telemetry)
            self.flood("service up", telemetry)
            telemetry.flush(60.0)
            self.throughput(telemetry)
            os.kill(pid, signal.SIGSTOP)
            self.both("service stopped", telemetry)
            self.flood("service stopped", telemetry)
        self.both("service dead", telemetry)
        telemetry.close(1.0)

    def run_without_room(self, run_dir: RunDir, config: RunConfig, stack: ExitStack) -> None:
        if not stack.enter_context(full_disk(run_dir.spool)):
            print(json.dumps({"case": "no room for the spool", "skipped": "a tmpfs cannot be mounted"}), flush=True)
            return
        telemetry = Telemetry.for_run(config, run_dir, service="bench", instance="bench-1")
        logs.configure(run="b", service="b", instance="bench-1", path=run_dir.log("bench-1"), telemetry=telemetry)
        self.both("service dead and no room for the spool", telemetry)
        self.flood("service dead and no room for the spool", telemetry)
        telemetry.close(1.0)


def main() -> int:
    """0: every figure is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-calls", type=int, default=20_000)
    parser.add_argument("--num-flood", type=int, default=200_000)
    parser.add_argument("--pause-s", type=float, default=0.005)
    bench = Bench(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run_dir = RunDir(Path(folder)).create()
        config = RunConfig(run=RunSection(name="bench", run_dir=folder), metrics=MetricsSection())
        bench.run(run_dir, config)
        bench.run_without_room(run_dir, config, stack)
    return 0 if bench.good else 1


if __name__ == "__main__":
    sys.exit(main())
