"""What the sinks cost training. Prints JSON lines: the step time with all sinks at work against none, and its limit.

Trains the arithmetic example, with batches that make a step last about a second and a learning rate that keeps every
step's work the same, and adds and removes sinks by turns while it trains: five of every built-in kind (wandb offline,
TensorBoard, MLflow when its server is there, statsd, OpenTelemetry, a webhook, a class of one's own), and a reader of
/metrics. Each block with sinks is compared with the two around it without, and the cost is divided by five: one of each
costs less than a quiet machine's step times differ by. Tells what share of a core the service with its sinks takes, and
what their receivers take, which run on the same cores here. Nothing else should run. --rollout-batch-size 64 is the
demo's, whose steps last a third of a second.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from furlong import addresses
from furlong.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.01
SETTLE_S = 5.0
"""Left out after each change, once every sink is up to date: as their programs start and end they use the cores."""
READY_LIMIT_S = 240.0
ROLLOUT_LIMIT_S = 20.0
LOOK_S = 1.0
SCRAPE_S = 15.0
"""What Prometheus is usually told, and the guide shows."""
END_LIMIT_S = 60.0


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


class NullSink0(NullSink):
    """One of several."""


class NullSink1(NullSink):
    """One of several."""


class NullSink2(NullSink):
    """One of several."""


class NullSink3(NullSink):
    """One of several."""


class NullSink4(NullSink):
    """One of several."""


@dataclass(frozen=True)
class Receivers:
    """Who takes what the sinks send."""

    pids: list[int]
    kinds: dict[str, dict[str, str]]
    """The kinds of sinks that can be added while the service runs, each with its options."""


@contextlib.contextmanager
def receivers(folder: Path) -> Iterator[Receivers]:
    """Started, and stopped at the end."""
    with contextlib.ExitStack() as stack:
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Swallow)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        stack.callback(web.shutdown)
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{web.server_address[1]}"
        kinds = {
            "wandb": {"mode": "offline"},
            "tensorboard": {},
            "statsd": {"addr": f"127.0.0.1:{udp.getsockname()[1]}"},
            "otlp": {"endpoint": base},
            "otlp_logs": {"endpoint": base},
            "webhook": {"url": f"{base}/rows"},
        }
        pids = [os.getpid()]
        if server := stack.enter_context(mlflow_server(folder)):
            kinds["mlflow"] = {"uri": server[0]}
            pids.append(server[1])
        yield Receivers(pids, kinds)


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[tuple[str, int] | None]:
    """The address and the process of a real server; None when `make tools` did not fetch it."""
    sys.path.insert(0, str(ROOT))
    from tests import tools  # here: the sink of one's own is imported from this file, and needs none of it

    tool = tools.find("mlflow")
    if tool is None:
        print(json.dumps({"case": "mlflow", "skipped": tools.why_missing("mlflow")}), flush=True)
        yield None
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
        yield f"http://127.0.0.1:{port}", server.pid
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
class Block:
    """Some rollouts in a row with the same sinks."""

    step_ms: float
    """Mean of perf/step_time."""
    metrics_core_share: float
    """Processor time of the metrics service and its sinks' processes, as a share of one core."""
    receivers_core_share: float
    """The same of who takes what the sinks send."""
    busy_cores: float
    """The whole machine's."""


class Training:
    """A run of the example that goes on until it is ended."""

    def __init__(self, folder: Path, *, num_prompts: int, num_copies: int) -> None:
        self.run_dir = RunDir(folder)
        own = ["--metrics-sink", *(f"benchmarks.sinks.NullSink{number}" for number in range(num_copies))]
        command = [sys.executable, "-m", "furlong", "up", "--config", "examples/arithmetic/config.toml"]
        command += ["--run-dir", str(folder), "--num-rollout", "1000000", "--eval-interval", "0"]
        command += ["--rollout-batch-size", str(num_prompts), "--lr", "1e-12", *own]  # no step differs from another
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._up = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._entry: addresses.Address | None = None
        self._read, self._half = 0, b""
        self.step_s: dict[int, float] = {}
        """Seconds of each rollout so far."""

    def end(self) -> None:
        """Raises TimeoutError."""
        self._up.terminate()
        try:
            self._up.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._up.kill()
            raise TimeoutError(f"the run did not end within {END_LIMIT_S:g} s") from None

    def wait_ready(self) -> None:
        """Until the metrics service answers. Raises TimeoutError."""
        deadline = time.monotonic() + READY_LIMIT_S
        while self._entry is None or not self._entry.http:
            if time.monotonic() > deadline or self._up.poll() is not None:
                raise TimeoutError(f"no metrics service; see {self.run_dir.root}/logs")
            time.sleep(0.2)
            self._entry = addresses.find(self.run_dir, "metrics") if self.run_dir.addresses.exists() else None

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        """Raises OSError."""
        assert self._entry is not None
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._entry.http}{path}", data, headers, method=method)
        answer: bytes = self._opener.open(request, timeout=READY_LIMIT_S).read()
        return answer

    def wait_up_to_date(self) -> list[str]:
        """Until every sink has what there is; their names. Raises TimeoutError."""
        deadline = time.monotonic() + READY_LIMIT_S
        while True:
            sinks = json.loads(self.ask("GET", "/api/sinks"))["sinks"]
            tasks = [task for sink in sinks for task in sink["tasks"]]
            slow = [task["name"] for task in tasks if task["state"] != "healthy"]
            if not slow:
                return [sink["name"] for sink in sinks]
            if time.monotonic() > deadline:
                raise TimeoutError(f"not healthy within {READY_LIMIT_S:g} s: {', '.join(slow)}")
            time.sleep(0.5)

    def wait_rollouts(self, count: int, *, scraped: bool) -> list[float]:
        """Seconds of the next count rollouts. Raises TimeoutError."""
        self._look()
        begun, deadline = len(self.step_s), time.monotonic() + count * ROLLOUT_LIMIT_S
        scraped_at = 0.0
        while len(self.step_s) < begun + count:
            if time.monotonic() > deadline or self._up.poll() is not None:
                raise TimeoutError(f"{len(self.step_s) - begun} of {count} rollouts; see {self.run_dir.root}/logs")
            time.sleep(LOOK_S)
            if scraped and time.monotonic() - scraped_at >= SCRAPE_S:
                scraped_at = time.monotonic()
                self.ask("GET", "/metrics")
            self._look()
        return [self.step_s[step] for step in sorted(self.step_s)[begun : begun + count]]

    def block(self, count: int, *, scraped: bool, receivers: Sequence[int]) -> Block:
        """Train count rollouts. Raises TimeoutError."""
        assert self._entry is not None
        begun, machine = time.monotonic(), psutil.cpu_times()
        service, others = processor_s([self._entry.pid]), processor_s(receivers)
        steps = self.wait_rollouts(count, scraped=scraped)
        took, idle = time.monotonic() - begun, psutil.cpu_times().idle - machine.idle
        return Block(
            step_ms=round(statistics.fmean(steps) * 1e3, 2),
            metrics_core_share=round((processor_s([self._entry.pid]) - service) / took, 3),
            receivers_core_share=round((processor_s(receivers) - others) / took, 3),
            busy_cores=round((os.cpu_count() or 1) - idle / took, 2),
        )

    def _look(self) -> None:
        """Take what was written since."""
        if not self.run_dir.metrics_rows.exists():
            return
        with self.run_dir.metrics_rows.open("rb") as file:
            file.seek(self._read)
            *lines, self._half = (self._half + file.read()).split(b"\n")
            self._read = file.tell()
        for row in map(json.loads, lines):
            if row["axis"] == "rollout/step" and "perf/step_time" in row["values"]:
                self.step_s[row["step"]] = row["values"]["perf/step_time"]


def processor_s(pids: Sequence[int]) -> float:
    """Seconds that processes and their children have used; those of our own without the children."""
    used = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        family = [process] if pid == os.getpid() else [process, *process.children(recursive=True)]
        used += sum(sum(one.cpu_times()[:2]) for one in family)
    return used


def add(training: Training, to: Receivers, *, num_copies: int) -> None:
    """All sinks; those that were there go on where they were. Raises OSError, TimeoutError."""
    for number in range(num_copies):
        training.ask("POST", f"/api/sinks/benchmarks.sinks.NullSink{number}/restore")
        for kind, options in to.kinds.items():
            own = {"tensorboard": {"dir": f"board-{number}"}, "mlflow": {"experiment": f"copy-{number}"}}.get(kind, {})
            training.ask(
                "POST", "/api/sinks", {"name": f"{kind}-{number}", "kind": kind, "options": {**options, **own}}
            )
    training.wait_up_to_date()


def remove(training: Training) -> None:
    """All but metrics.jsonl, which is always there. Raises OSError, TimeoutError."""
    for name in training.wait_up_to_date():
        if name != "jsonl":
            training.ask("DELETE", f"/api/sinks/{name}?keep_cursor=true")


def by_turns(training: Training, to: Receivers, options: argparse.Namespace) -> list[Block]:
    """Blocks without and with sinks by turns, the first and the last without. Raises TimeoutError."""
    blocks = []
    training.wait_ready()
    training.wait_rollouts(8, scraped=False)  # the first ones are slower
    for number in range(2 * options.num_pairs + 1):
        with_sinks = number % 2 == 1
        if with_sinks:
            add(training, to, num_copies=options.num_copies)
        else:
            remove(training)
        time.sleep(SETTLE_S)
        blocks.append(training.block(options.num_rollout, scraped=with_sinks, receivers=to.pids))
        shown = {"case": "block", "num_copies": options.num_copies if with_sinks else 0, **asdict(blocks[-1])}
        print(json.dumps(shown), flush=True)
    return blocks


def main() -> int:
    """0: within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rollout", type=int, default=20, help="of a block (%(default)s)")
    parser.add_argument("--num-pairs", type=int, default=6, help="of blocks (%(default)s)")
    parser.add_argument("--num-copies", type=int, default=5, choices=range(1, 6), help="of each sink (%(default)s)")
    parser.add_argument(
        "--rollout-batch-size", type=int, default=256, help="prompts a step; the demo: 64 (%(default)s)"
    )
    options = parser.parse_args()
    if options.num_rollout < 1 or options.num_pairs < 2:
        parser.error("--num-rollout must be at least 1, --num-pairs at least 2")
    with tempfile.TemporaryDirectory() as scratch, receivers(Path(scratch)) as to:
        folder, prompts = Path(scratch) / "run", options.rollout_batch_size
        training = Training(folder, num_prompts=prompts, num_copies=options.num_copies)
        try:
            blocks = by_turns(training, to, options)
        finally:
            training.end()
    # of one copy: what several cost together is at the least as many times as much
    costs = [
        blocks[at].step_ms / statistics.fmean((blocks[at - 1].step_ms, blocks[at + 1].step_ms)) - 1
        for at in range(1, len(blocks), 2)
    ]
    ratio = 1 + statistics.fmean(costs) / options.num_copies
    error = statistics.stdev(costs) / len(costs) ** 0.5 / options.num_copies
    shares = {
        f"{name}_metrics_core_share": round(statistics.fmean(block.metrics_core_share for block in blocks[at::2]), 3)
        for at, name in enumerate(("none", "all"))
    }
    result = {"ratio": round(ratio, 4), "standard_error": round(error, 4), "limit": LIMIT, **shares}
    print(json.dumps({"case": "all sinks to none", **result}), flush=True)
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
