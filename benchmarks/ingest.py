"""How fast the metrics service takes records in, on one core, and rsyslog's no-loss modes doing the same job.

Prints a JSON line a case: records of 300 bytes a second, each on disk before it is acknowledged; CPU seconds of the
service per 100,000; how long an acknowledgement takes; the most memory the service had. Limits: 150,000 records a
second in batches of 64, 300 MB, and twice rsyslog with RELP and a disk queue. Nothing else should run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import loadclient, relp
from furlong import addresses, rpc
from furlong.config import RunConfig
from furlong.config.sections import MetricsSection, RunSection
from furlong.rundir import RunDir

LIMIT_RECORDS_PER_S = 150_000
LIMIT_RSS_MB = 300.0
LIMIT_TIMES_RSYSLOG = 2.0
START_LIMIT_S = 30.0
TOOLS = Path(__file__).parent.parent / ".tools"


@contextmanager
def service(folder: Path) -> Iterator[tuple[int, str]]:
    """The pid and the address of a metrics service that has one core."""
    run_dir = RunDir(folder).create()
    config = RunConfig(run=RunSection(name="bench", run_dir=str(folder)), metrics=MetricsSection())
    path = folder / "bench.json"
    path.write_text(config.model_dump_json())
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(path)])
    try:
        entry = addresses.wait_for(run_dir, "metrics", timeout_s=START_LIMIT_S)
        rpc.wait_serving(entry.grpc or "", "furlong.v1.Metrics", timeout_s=START_LIMIT_S)
        yield process.pid, entry.grpc or ""
    finally:
        process.kill()
        process.wait(10)


def serve(path: Path) -> int:
    """In the service's process: the first core, and nothing else."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from services.metrics.main import main as serve_metrics

    return serve_metrics(RunConfig.model_validate_json(path.read_bytes()), rank=0, foreground=False)


def measure(
    case: str, num_producers: int, batch_size: int, num_records: int, *, size_bytes: int = 300
) -> dict[str, object]:
    """One load on a fresh service."""
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as (pid, address):
        before = _cpu_s(pid)
        taken = loadclient.run_load(
            address, num_producers=num_producers, batch_size=batch_size, num_records=num_records, size_bytes=size_bytes
        )
        cpu_s = _cpu_s(pid) - before
        return {
            "case": case,
            "records_per_s": round(taken.num_records / taken.seconds),
            "cpu_s_per_100k": round(cpu_s / taken.num_records * 1e5, 3),
            "ack_p50_ms": round(taken.percentile_ms(0.5), 1),
            "ack_p99_ms": round(taken.percentile_ms(0.99), 1),
            "peak_rss_mb": round(_peak_rss_mb(pid), 1),
            "num_records": taken.num_records,
        }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(row.split()[1]) for row in status.splitlines() if row.startswith("VmHWM")) / 1024


def measure_ours(num_records: int, rounds: int) -> tuple[list[dict[str, object]], float]:
    """All cases; the middle rate of the one that counts."""
    counting = [measure("8 producers, batches of 64", 8, 64, num_records) for _ in range(rounds)]
    cases = [
        *counting,
        measure("8 producers, batches of 256", 8, 256, num_records),
        measure("1 producer, batches of 64", 1, 64, num_records // 2),
        measure("1000 producers, batches of 64", 1000, 64, num_records),
        measure("8 producers, 9 MiB a batch", 8, 9, 8 * 9 * 3, size_bytes=1024 * 1024),
    ]
    return cases, statistics.median(float(str(case["records_per_s"])) for case in counting)


def measure_rsyslog(num_lines: int, rounds: int) -> dict[str, float]:
    """The middle rate of each mode; prints each run."""
    reason = relp.why_absent(TOOLS)
    if reason:
        print(json.dumps({"case": "rsyslog", "skipped": reason}), flush=True)
        return {}
    line = loadclient.record(0, 300)
    rates: dict[str, list[float]] = {"disk": [], "direct": []}
    for _ in range(rounds):
        for mode, share in (("disk", 1), ("direct", 10)):
            with tempfile.TemporaryDirectory() as folder:
                done = relp.run_rsyslog(
                    TOOLS, Path(folder), mode=mode, num_connections=8, num_lines=num_lines // share, line=line
                )
            rates[mode].append(done.lines_per_s)
            shown = {
                "case": f"rsyslog RELP, queue {mode}, 8 connections",
                "records_per_s": round(done.lines_per_s),
                "cpu_s_per_100k": round(done.cpu_s_per_100k, 3),
                "peak_rss_mb": round(done.peak_rss_mb, 1),
                "num_records": done.num_lines,
            }
            print(json.dumps(shown), flush=True)
    return {mode: statistics.median(found) for mode, found in rates.items()}


def main() -> int:
    """0: within every limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-records", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[1:]) or set(cores))  # the first is the service's
    cases, rate = measure_ours(options.num_records, options.rounds)
    for case in cases:
        print(json.dumps(case), flush=True)
    os.sched_setaffinity(0, set(cores))  # rsyslog has them all
    peers = measure_rsyslog(options.num_records // 4, options.rounds)
    peak = max(float(str(case["peak_rss_mb"])) for case in cases)
    result = {
        "case": "limits",
        "records_per_s_to_limit": round(rate / LIMIT_RECORDS_PER_S, 2),
        "peak_rss_to_limit": round(peak / LIMIT_RSS_MB, 2),
        **{f"times_rsyslog_{mode}": round(rate / peer, 2) for mode, peer in peers.items()},
    }
    print(json.dumps(result), flush=True)
    beaten = not peers or rate >= LIMIT_TIMES_RSYSLOG * peers["disk"]
    return 0 if rate >= LIMIT_RECORDS_PER_S and peak <= LIMIT_RSS_MB and beaten else 1


if __name__ == "__main__":
    sys.exit(main())
