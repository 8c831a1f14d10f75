"""What the sinks cost training. Prints JSON lines: the step time with all sinks on against none, and its limit.

Runs the arithmetic example by turns without and with every built-in sink (wandb offline, TensorBoard, MLflow when its
server is there, statsd, OpenTelemetry, a webhook, a sink of one's own, and a reader of /metrics), the same seed each
time, and compares the median of perf/step_time pair by pair. Nothing else should run.
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
from pathlib import Path

from furlong import addresses
from furlong.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.01
WARM_UP_ROLLOUTS = 8
"""Left out: while the sinks' programs start, they share the cores with the first rollouts."""
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


def train(folder: Path, flags: Sequence[str], *, num_rollout: int, scraped: bool) -> list[float]:
    """One run of the example; its step times in seconds, the first ones left out."""
    run_dir = RunDir(folder)
    command = [sys.executable, "-m", "furlong", "up", "--config", "examples/arithmetic/config.toml"]
    command += ["--run-dir", str(folder), "--num-rollout", str(num_rollout), "--eval-interval", "0", *flags]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + RUN_LIMIT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        while run.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a run of {num_rollout} rollouts took over {RUN_LIMIT_S:g} s")
            entry = addresses.find(run_dir, "metrics") if scraped and run_dir.addresses.exists() else None
            if entry is not None and entry.http:
                with contextlib.suppress(OSError):
                    opener.open(f"{entry.http}/metrics", timeout=2.0).read()
            time.sleep(1.0)
    finally:
        if run.poll() is None:
            run.kill()
        run.wait()
    if run.returncode:
        raise RuntimeError(f"the run ended with {run.returncode}; see {folder}/logs")
    rows = [json.loads(line) for line in run_dir.metrics_rows.read_text().splitlines()]
    steps = {row["step"]: row["values"].get("perf/step_time") for row in rows if row["axis"] == "rollout/step"}
    return [steps[step] for step in sorted(steps) if step >= WARM_UP_ROLLOUTS and steps[step] is not None]


def main() -> int:
    """0: within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rollout", type=int, default=40)
    parser.add_argument("--num-pairs", type=int, default=3)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as scratch, receivers(Path(scratch)) as flags:
        for number in range(options.num_pairs):
            taken = {}
            for name in ("none", "all") if number % 2 == 0 else ("all", "none"):
                folder = Path(scratch) / f"{name}-{number}"
                given = flags if name == "all" else []
                taken[name] = train(folder, given, num_rollout=options.num_rollout, scraped=name == "all")
            medians = {name: statistics.median(times) for name, times in taken.items()}
            ratios.append(medians["all"] / medians["none"])
            shown = {f"{name}_step_ms": round(median * 1e3, 1) for name, median in medians.items()}
            print(json.dumps({"case": "pair", **shown, "all_to_none": round(ratios[-1], 4)}), flush=True)
    ratio = statistics.median(ratios)
    print(json.dumps({"case": "all sinks to none", "ratio": round(ratio, 4), "limit": LIMIT}), flush=True)
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
