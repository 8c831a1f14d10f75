"""How fast a metrics service answers and shows what comes: `python benchmarks/asking.py`.

A service of its own with 1,000,000 log lines and 10,000 steps of 20 keys on disk; then one key's curve, the newest log
lines with a filter that fits none, HTTP taking records in, and how far a live stream is behind the producer's call.
"""

import gzip
import http.client
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from furlong import addresses
from furlong.asking.client import MetricsClient
from furlong.clock import now_iso
from furlong.rundir import RunDir

NUM_LINES = 1_000_000
NUM_STEPS = 10_000
NUM_KEYS = 20
NUM_LIVE = 100


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        service = _start(folder)
        try:
            _fill(service[1])
        finally:
            _stop(service[0])
        began = time.monotonic()
        process, client = _start(folder)
        _say("start on 1,000,000 records", time.monotonic() - began, limit=3.0)
        try:
            _questions(client)
            _live(client, RunDir(Path(folder, "kept")))
            _taking_in(client)
        finally:
            _stop(process)


def _start(folder: str) -> tuple["subprocess.Popen[bytes]", MetricsClient]:
    kept = Path(folder, "kept")
    command = [sys.executable, "-m", "furlong", "metrics", "--port", "0", "--dir", str(kept), "--log-level", "warning"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60.0
    while True:
        entry = addresses.find(RunDir(kept), "metrics") if kept.exists() else None
        if entry is not None and entry.http and entry.pid == process.pid:
            return process, MetricsClient(entry.http)
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError("the metrics service did not start")
        time.sleep(0.01)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def _fill(client: MetricsClient) -> None:
    text = "x" * 150
    for begin in range(0, NUM_LINES, 50_000):
        _post(
            client,
            b"\n".join(
                orjson.dumps(
                    {"ts": now_iso(), "level": "info", "event": "line", "run": "bench", "service": "trainer",
                     "instance": "trainer-0", "number": number, "text": text}
                )
                for number in range(begin, begin + 50_000)
            ),
        )  # fmt: skip
    for begin in range(0, NUM_STEPS, 1000):
        _post(
            client,
            b"\n".join(
                orjson.dumps(
                    {"ts": now_iso(), "event": "metrics", "run": "bench", "axis": "train/step", "step": step,
                     "values": {f"train/key_{key}": step * 0.001 + key for key in range(NUM_KEYS)}}
                )
                for step in range(begin, begin + 1000)
            ),
        )  # fmt: skip


def _post(client: MetricsClient, body: bytes, **headers: str) -> dict[str, Any]:  # Any: JSON
    address = urlsplit(client.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.request("POST", "/v1/records", body, headers)
    answer = connection.getresponse()
    said: dict[str, Any] = orjson.loads(answer.read())
    connection.close()
    if answer.status != 200:
        raise RuntimeError(said)
    return said


def _questions(client: MetricsClient) -> None:
    key = "train/key_7"
    _timed("one key over 10,000 steps", lambda: client.get("/api/points", {"key": key, "run": "bench"}), limit=0.1)
    thin = {"key": key, "run": "bench", "max_points": 500}
    _timed("the same, 500 points", lambda: client.get("/api/points", thin), limit=0.1)
    _timed("the newest 100 rows", lambda: client.get("/api/rows", {"run": "bench", "axis": "train/step"}), limit=0.1)
    _timed("the newest 100 log lines", lambda: client.get("/api/logs", {"run": "bench"}), limit=0.1)
    warnings = {"run": "bench", "level": "warning"}
    _timed("warnings among 1,000,000 lines, none there", lambda: client.get("/api/logs", warnings), limit=1.0)
    rare = {"run": "bench", "text": '"number":17,'}
    _timed("one text among 1,000,000 lines", lambda: client.get("/api/logs", rare), repeat=3)


def _live(client: MetricsClient, run_dir: RunDir) -> None:
    """From the producer's call (Telemetry) to the event in the client, and to a line of `furlong tail`."""
    from furlong.config import RunConfig
    from furlong.config.sections import RunSection
    from furlong.records import Last
    from furlong.telemetry import Telemetry

    sent: dict[int, float] = {}
    behind: list[float] = []
    ready = threading.Event()

    def watch() -> None:
        for event in client.live({"run": "live", "kinds": "row"}, None):
            if event.name == "row":
                behind.append(time.perf_counter() - sent[orjson.loads(event.data)["step"]])
            ready.set()
            if len(behind) >= NUM_LIVE:
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    ready.wait(10)
    command = [sys.executable, "-m", "furlong", "tail", "--url", client.url, "--run", "live", "--rows", "--json"]
    tail = subprocess.Popen([*command, "--last", "1"], stdout=subprocess.PIPE)
    assert tail.stdout is not None
    telemetry = Telemetry.for_run(RunConfig(run=RunSection(name="live")), run_dir, service="x", instance="x-0")
    printed: list[float] = []
    for step in range(NUM_LIVE):
        sent[step] = time.perf_counter()
        telemetry.metrics("train/step", step, {"train/loss": Last(step)}, part="x", parts=["x"])
        line = tail.stdout.readline()  # one at a time: as a person sees it
        printed.append(time.perf_counter() - sent[orjson.loads(line)["step"]])
    thread.join(20)
    telemetry.close(5)
    tail.kill()
    tail.wait()
    for what, times in (("a live stream is behind", behind), ("a line of furlong tail is behind", printed[1:])):
        _say(f"{what}, median", statistics.median(times))
        _say(f"{what}, worst of {len(times)}", max(times), limit=0.2)


def _taking_in(client: MetricsClient) -> None:
    lines = [orjson.dumps({"event": "line", "run": "http", "number": n, "text": "y" * 240}) for n in range(100_000)]
    forms = (
        ("lines", b"\n".join(lines), {}),
        ("lines, gzip", gzip.compress(b"\n".join(lines), 1), {"Content-Encoding": "gzip"}),
        ("an array", b"[" + b",".join(lines) + b"]", {}),
    )
    for name, body, headers in forms:
        began = time.perf_counter()
        _post(client, body, **headers)
        print(f"{f'taken in over HTTP as {name}':52} {len(lines) / (time.perf_counter() - began):>10,.0f} records/s")


def _timed(what: str, ask: Callable[[], object], *, limit: float | None = None, repeat: int = 10) -> None:
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began)
    _say(f"{what}, median of {repeat}", statistics.median(times), limit=limit)


def _say(what: str, seconds: float, *, limit: float | None = None) -> None:
    verdict = "" if limit is None else f"  limit {limit * 1000:,.0f} ms{'' if seconds <= limit else '  MISSED'}"
    print(f"{what:52} {seconds * 1000:>10,.1f} ms{verdict}", flush=True)


if __name__ == "__main__":
    main()
