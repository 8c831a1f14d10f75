"""A real MLflow server, asked over its own REST API."""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # Any: what JSON holds

from tests import tools
from tests.metrics.running import until


class MlflowServer:
    """One that serves."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def get(self, path: str, **query: str) -> Any:
        url = f"{self.uri}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)

    def post(self, path: str, **body: object) -> Any:
        url, headers = f"{self.uri}/api/2.0/mlflow/{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        try:
            found = self.get("experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
        except urllib.error.HTTPError:
            return []
        return self.post("runs/search", experiment_ids=[found]).get("runs", [])

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """Steps and values of all points, oldest first."""
        found = self.get("metrics/get-history", run_id=run_id, metric_key=key, max_results="10000").get("metrics", [])
        points = sorted(found, key=lambda point: (int(point["timestamp"]), int(point.get("step", 0))))
        return [(int(point.get("step", 0)), float(point["value"])) for point in points]

    def curve(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """By step; of a step that has several points, the newest."""
        return sorted(dict(self.history(run_id, key)).items())


@contextmanager
def mlflow_serving(folder: Path, port: int | None = None) -> Generator[MlflowServer]:
    """Serves while entered, with what is in the folder. Skips the test when there is none."""
    tool = tools.need("mlflow")
    port = port or tools.free_port()
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    command = [*tool.command, "server", *store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "mlflow.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env={**tool.environment, **quiet}, start_new_session=True
        )
    uri = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        assert process.poll() is None, (folder / "mlflow.log").read_text()
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=5):
                return True
        except OSError:
            return False

    try:
        until(serves, "the MLflow server", limit_s=90)
        yield MlflowServer(uri)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
