"""What the sinks cost training. Prints JSON lines: the step time with all sinks on against none, and its limit.

Runs the arithmetic example by turns without and with every built-in sink (wandb offline, TensorBoard, MLflow when its
server is there, statsd, OpenTelemetry, a webhook, a sink of one's own, and a reader of /metrics), the same seed each
time, and compares the medians of perf/step_time; tells how far the runs without sinks lie apart, and what share of a
core the service and its sinks take. Nothing else should run.
"""

import argparse
import contextlib
import http.server
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from furlong import addresses
from furlong.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.01
WARM_UP_ROLLOUTS = 8
"""Left out: while the sinks' programs start, they share the cores with the first rollouts."""
LEAST_ROLLOUTS = 30
"""What the processor's share is told from takes some seconds."""
RUN_LIMIT_S = 300.0


class Swallow(http.server.BaseHTTPRequestHandler):
    """Takes every POST."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


class NullSink:
    """A sink of one's own that keeps nothing."""

    def write(self, rows: Sequence[object]) -> None:
        """Take the rows."""


@contextlib.contextmanager
def receivers(folder: Path) -> Iterator[list[str]]:
    """The flags of all sinks, and who takes what they send."""
    with contextlib.ExitStack() as stack:
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Swallow)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        stack.callback(web.shutdown)
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{web.server_address[1]}"
        flags = ["--use-wandb", "--wandb-mode", "offline", "--use-tensorboard"]
        flags += ["--statsd-addr", f"127.0.0.1:{udp.getsockname()[1]}", "--otlp-endpoint", base]
        flags += ["--metrics-webhook", f"{base}/rows", "--metrics-sink", "benchmarks.sinks.NullSink"]
        if uri := stack.enter_context(mlflow_server(folder)):
            flags += ["--mlflow-tracking-uri", uri]
        yield flags


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """The address of a real server; empty when `make tools` did not fetch it."""
    sys.path.insert(0, str(ROOT))
    from tests import tools  # here: the sink of one's own is imported from this file, and needs none of it

    tool = tools.find("mlflow")
    if tool is None:
        print(json.dumps({"case": "mlflow", "skipped": tools.why_missing("mlflow")}), flush=True)
        yield ""
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*tool.command, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    with (folder / "mlflow.log").open("wb") as output:
        server = subprocess.Popen(command, env=tool.environment, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for_http(f"http://127.0.0.1:{port}/health", limit_s=90.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for_http(url: str, *, limit_s: float) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            opener.open(url, timeout=2.0).close()
            return
        time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {limit_s:g} s")


@dataclass
class Trained:
    """One run of the example, the first rollouts left out."""

    step_s: list[float]
    core_share: float
    """Processor time of the metrics service and its sinks' processes, as a share of one core."""


def train(folder: Path, flags: Sequence[str], *, num_rollout: int, scraped: bool) -> Trained:
    """Raises TimeoutError, and RuntimeError for a run that does not end well."""
    run_dir = RunDir(folder)
    command = [sys.executable, "-m", "furlong", "up", "--config", "examples/arithmetic/config.toml"]
    command += ["--run-dir", str(folder), "--num-rollout", str(num_rollout), "--eval-interval", "0", *flags]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + RUN_LIMIT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    samples: list[tuple[float, float]] = []
    try:
        while run.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a run of {num_rollout} rollouts took over {RUN_LIMIT_S:g} s")
            entry = addresses.find(run_dir, "metrics") if run_dir.addresses.exists() else None
            if entry is not None and entry.http and scraped:
                with contextlib.suppress(OSError):
                    opener.open(f"{entry.http}/metrics", timeout=2.0).read()
            if entry is not None and len(step_times(run_dir)) > WARM_UP_ROLLOUTS:
                with contextlib.suppress(psutil.Error):
                    samples.append((time.monotonic(), processor_s(entry.pid)))
            time.sleep(1.0)
    finally:
        if run.poll() is None:
            run.kill()
        run.wait()
    if run.returncode:
        raise RuntimeError(f"the run ended with {run.returncode}; see {folder}/logs")
    steps = step_times(run_dir)
    (began, first), (ended, last) = samples[0], samples[-2]  # the last one may be of its end
    return Trained(
        [steps[step] for step in sorted(steps) if step >= WARM_UP_ROLLOUTS], (last - first) / (ended - began)
    )


def step_times(run_dir: RunDir) -> dict[int, float]:
    """Seconds of each rollout so far."""
    if not run_dir.metrics_rows.exists():
        return {}
    rows = [json.loads(line) for line in run_dir.metrics_rows.read_text().splitlines() if line.endswith("}")]
    rollouts = [row for row in rows if row["axis"] == "rollout/step" and "perf/step_time" in row["values"]]
    return {row["step"]: row["values"]["perf/step_time"] for row in rollouts}


def processor_s(pid: int) -> float:
    """Seconds that a process and its children have used."""
    service = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (service, *service.children(recursive=True)))


def main() -> int:
    """0: within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rollout", type=int, default=60, help=f"at least {LEAST_ROLLOUTS}")
    parser.add_argument("--num-pairs", type=int, default=5)
    options = parser.parse_args()
    if options.num_rollout < LEAST_ROLLOUTS or options.num_pairs < 1:
        parser.error(f"--num-rollout must be at least {LEAST_ROLLOUTS}, --num-pairs at least 1")
    taken: dict[str, list[float]] = {"none": [], "all": []}
    with tempfile.TemporaryDirectory() as scratch, receivers(Path(scratch)) as flags:
        for number in range(options.num_pairs):
            shown: dict[str, float] = {}
            for name in ("none", "all") if number % 2 == 0 else ("all", "none"):
                given = flags if name == "all" else []
                folder = Path(scratch) / f"{name}-{number}"
                trained = train(folder, given, num_rollout=options.num_rollout, scraped=name == "all")
                taken[name].append(statistics.median(trained.step_s))
                shown[f"{name}_step_ms"] = round(taken[name][-1] * 1e3, 1)
                shown[f"{name}_metrics_core_share"] = round(trained.core_share, 3)
            print(json.dumps({"case": "pair", **shown}), flush=True)
    ratio = statistics.median(taken["all"]) / statistics.median(taken["none"])
    spread = max(taken["none"]) / min(taken["none"])
    result = {"ratio": round(ratio, 4), "limit": LIMIT, "slowest_to_quickest_without": round(spread, 4)}
    print(json.dumps({"case": "all sinks to none", **result}), flush=True)
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
