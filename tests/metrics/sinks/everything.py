"""Every sink's other side at once, the real programs among them, and the curves that each of them shows."""

import json
import math
import re
import socket
import subprocess
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: what JSON holds

from furlong.records import AXES
from services.metrics.sinks.mlflow_names import fold_metric
from services.metrics.sinks.statsd import fold_name
from tests import tools
from tests.metrics.prometheus.scraping import prometheus_scraping
from tests.metrics.running import until
from tests.metrics.sinks.event_files import by_tensorboard
from tests.metrics.sinks.mlflow_server import MlflowServer, mlflow_serving
from tests.metrics.sinks.otlp_decoding import points_in
from tests.metrics.sinks.receiver import Receiver, receiving
from tests.metrics.wandb_file import read_runs

Curves = dict[str, dict[int, float]]
"""Key -> step -> value; of a step that was said twice, what counts."""
EXPERIMENT = "everything"


@dataclass(frozen=True)
class Everything:
    """What listens."""

    webhook: Receiver
    otlp: Receiver
    mlflow: MlflowServer
    statsd_port: int
    statsd_admin: int
    metrics_port: int
    ask_prometheus: Callable[[str], list[dict[str, Any]]]

    def options(self) -> dict[str, object]:
        """As fields of the configuration's metrics section."""
        return {
            "use_wandb": True,
            "wandb_mode": "offline",
            "use_tensorboard": True,
            "mlflow_tracking_uri": self.mlflow.uri,
            "mlflow_experiment": EXPERIMENT,
            "statsd_addr": f"127.0.0.1:{self.statsd_port}",
            "otlp_endpoint": self.otlp.url,
            "metrics_webhook": self.webhook.url,
            "metrics_port": self.metrics_port,
        }

    def flags(self) -> list[str]:
        """The same, as flags."""
        options = self.options()
        return [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()
        ]

    def webhook_curves(self) -> Curves:
        bodies = [json.loads(request.body) for request in self.webhook.taken]
        return curves_of(row for body in bodies for row in body["rows"])

    def otlp_curves(self) -> Curves:
        """Points of a row are joined by their time; the newer attempt counts."""
        steps: dict[tuple[str, int], tuple[int, int]] = {}
        points = points_in(self.otlp.taken)
        for _, time, value, attributes in points:
            if attributes["furlong.key"] == attributes["furlong.axis"]:
                steps[attributes["furlong.axis"], time] = (attributes["furlong.attempt"], int(value))
        found: Curves = {}
        placed = [(*steps[a["furlong.axis"], time], time, a["furlong.key"], value) for _, time, value, a in points]
        for _, step, _, key, value in sorted(placed, key=lambda one: one[:3]):
            found.setdefault(key, {})[step] = value
        return found

    def mlflow_curves(self, keys: Iterable[str]) -> Curves:
        (run,) = self.mlflow.runs(EXPERIMENT)
        run_id = run["info"]["run_id"]
        return {key: dict(self.mlflow.curve(run_id, fold_metric(key))) for key in keys}

    def statsd_newest(self) -> dict[str, float]:
        return statsd_gauges(self.statsd_admin) or {}


def curves_of(rows: Iterable[Mapping[str, Any]]) -> Curves:
    """Of rows in the order in which they were handed on: a newer attempt takes back what it has come to."""
    found: Curves = {}
    attempts: dict[tuple[str, str], int] = {}
    axes: dict[str, set[str]] = {}
    for row in rows:
        place = (row["run"], row["axis"])
        if row["attempt"] > attempts.get(place, 0):
            attempts[place] = row["attempt"]
            for key in axes.get(row["axis"], ()):
                found[key] = {step: value for step, value in found[key].items() if step < row["step"]}
        for key, value in row["values"].items():
            axes.setdefault(row["axis"], set()).add(key)
            found.setdefault(key, {})[row["step"]] = float(value)
    return found


def jsonl_curves(path: Path) -> Curves:
    return curves_of(map(json.loads, path.read_text().splitlines()))


def wandb_curves(folder: Path) -> Curves:
    found: Curves = {}
    for point in (point for run in read_runs(folder) for point in run.points):
        (axis,) = [key for key in point if key in AXES]
        for key, value in point.items():
            is_number = isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")  # no histogram
            if is_number and not key.endswith(("/attempt", "/rollout_id")) and key != axis:
                found.setdefault(key, {})[int(point[axis])] = float(value)
    return found


def tensorboard_curves(folder: Path) -> Curves:
    """FOLDER/TAG without its folder."""
    return {name.split("/", 2)[2]: dict(points) for name, points in by_tensorboard(folder).items()}


def statsd_name(run: str, key: str) -> str:
    return "furlong." + fold_name(f"{run}\nAXIS\n{key}")  # the axis stands in no name


def differences(found: Curves, expected: Curves, *, relative: float = 0.0) -> list[str]:
    """Where the curves are not the same. Empty: they are."""
    told = [f"{key}: is not there" for key in expected.keys() - found.keys()]
    for key in expected.keys() & found.keys():
        if found[key].keys() != expected[key].keys():
            told.append(f"{key}: steps {sorted(found[key])} instead of {sorted(expected[key])}")
            continue
        told += [
            f"{key} {step}: {found[key][step]} instead of {value}"
            for step, value in expected[key].items()
            if not same(found[key][step], value, relative=relative)
        ]
    return told


def same(one: float, other: float, *, relative: float = 0.0) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or math.isclose(one, other, rel_tol=relative)


def statsd_gauges(admin_port: int) -> dict[str, float] | None:
    """As the daemon's management port says. None: it does not listen."""
    try:
        with socket.create_connection(("127.0.0.1", admin_port), timeout=5) as connection:
            connection.sendall(b"gauges\n")
            answer = b""
            while b"END" not in answer:
                answer += connection.recv(65536)
    except ConnectionRefusedError:
        return None
    return {
        name.strip("'\""): float(value)
        for name, value in re.findall(r"('[^']*'|[\w$]+): (-?[\d.e+-]+)", answer.decode().partition("END")[0])
    }


@contextmanager
def statsd_serving(folder: Path) -> Generator[tuple[int, int]]:
    """A real daemon; its port, and that of its management."""
    tool = tools.need("statsd")
    port, admin = tools.free_port(), tools.free_port()
    config = f'{{port: {port}, mgmt_port: {admin}, address: "127.0.0.1", mgmt_address: "127.0.0.1", backends: []}}'
    (folder / "statsd.js").write_text(config)
    with (folder / "statsd.log").open("w") as log:
        daemon = subprocess.Popen([*tool.command, str(folder / "statsd.js")], stdout=log, stderr=log)
    try:
        until(lambda: statsd_gauges(admin) is not None, "statsd listening")
        yield port, admin
    finally:
        daemon.terminate()
        daemon.wait(10)


@contextmanager
def everything(folder: Path) -> Generator[Everything]:
    """All of it. Skips the test when one of the programs is not here."""
    for name in ("prometheus", "statsd", "mlflow", "tensorboard"):
        tools.need(name)
    metrics_port = tools.free_port()
    with ExitStack() as stack:
        statsd = stack.enter_context(statsd_serving(folder))
        yield Everything(
            webhook=stack.enter_context(receiving()),
            otlp=stack.enter_context(receiving()),
            mlflow=stack.enter_context(mlflow_serving(folder)),
            statsd_port=statsd[0],
            statsd_admin=statsd[1],
            metrics_port=metrics_port,
            ask_prometheus=stack.enter_context(prometheus_scraping(folder, f"http://127.0.0.1:{metrics_port}")),
        )
