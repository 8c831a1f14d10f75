"""Starts a real engine process on port 0 and talks to it; used by the tests and the benchmark."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 60
CALL_TIMEOUT_S = 60


@dataclass(frozen=True)
class Reply:
    """Status and body of a response; `json` where the body is JSON."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def events(self) -> list[Any]:
        """The JSON events of a stream that ended properly."""
        parts = self.text.strip().split("\n\n")
        assert parts[-1] == "data: [DONE]", parts[-1]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def call_port(
    port: int, method: str, path: str, body: Any = None, *, raw: bytes | None = None, kind: str = "json"
) -> Reply:
    """One HTTP call on loopback."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_TIMEOUT_S)
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    types = {"json": "application/json", "text": "text/plain"}
    try:
        connection.request(method, path, body=data, headers={"content-type": types[kind]})
        response = connection.getresponse()
        return Reply(response.status, response.read())
    finally:
        connection.close()


class EngineProcess:
    """One engine and a pool of threads for calls that wait."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port_file = folder / "port"
        self.log_path = folder / "log"
        command = [sys.executable, "-m", "services.rollout.engine", "--model-path", str(model), "--port", "0"]
        command += ["--port-file", str(self.port_file), "--parent-pid", str(os.getpid()), *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment
            )
        self.port = self._await_port()
        self._pool = ThreadPoolExecutor(64)

    def _await_port(self) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"engine did not start: {self.log_path.read_text()}")
            time.sleep(0.02)
        return int(self.port_file.read_text())

    def call(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, kind: str = "json") -> Reply:
        return call_port(self.port, method, path, body, raw=raw, kind=kind)

    def post(self, path: str, body: Any) -> Reply:
        return self.call("POST", path, body)

    def get(self, path: str) -> Reply:
        return self.call("GET", path)

    def later(self, path: str, body: Any) -> Future[Reply]:
        """POST in another thread."""
        return self._pool.submit(self.post, path, body)

    def generate(self, text: str = "hello", **fields: Any) -> Any:
        params = {"max_new_tokens": 8, "temperature": 0} | fields.pop("params", {})
        reply = self.post("/generate", {"text": text, "sampling_params": params} | fields)
        assert reply.status == 200, reply.text
        return reply.json

    def running(self) -> int:
        return self.get("/v1/loads").json["loads"][0]["num_running_reqs"]

    def await_running(self, count: int, timeout_s: float = 10) -> None:
        """Wait until that many samples run."""
        deadline = time.monotonic() + timeout_s
        while self.running() != count:
            assert time.monotonic() < deadline, f"{self.running()} run, not {count}"
            time.sleep(0.01)

    def stop(self) -> int:
        """Ask it to end; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
