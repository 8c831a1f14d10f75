"""A sink of the user's own: handed every row, and unable to hurt anything."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from furlong.config import RunConfig
from furlong.config.sections import MetricsSection, RunSection
from furlong.launch.preflight import bad_hooks
from tests.metrics.running import MetricsProcess, batch, part, send, until

Make = Callable[..., MetricsProcess]
HERE = "tests.metrics.own_sinks"


def start(make: Make, tmp_path: Path, *names: str, **options: Any) -> MetricsProcess:
    classes = tuple(f"{HERE}.{name}" for name in names)
    return make(environment={"OWN_SINK": str(tmp_path / "own")}, metrics_sink=classes, **options).start()


def told(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    path = tmp_path / f"own.{name}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(tmp_path: Path, name: str) -> list[int]:
    return [said["step"] for said in told(tmp_path, name) if "step" in said]


def send_steps(service: MetricsProcess, first: int, last: int, value: object = 1) -> None:
    send(service, batch([part(n, {"train/loss": ["last", value]}) for n in range(first, last + 1)], first=first))


def test_own_sinks_get_every_row_once_over_restarts_and_kills(make: Make, tmp_path: Path) -> None:
    service = start(make, tmp_path, "Good", "OnlyWrite", alert_webhook="http://127.0.0.1:1/HUSH")
    send_steps(service, 1, 5, "NaN")
    service.flush()
    service.stop()
    service.start()
    send_steps(service, 6, 8)
    service.flush()
    service.kill()
    until(lambda: {"closed": True} in told(tmp_path, "Good")[-1:], "the sink closed though the service was killed")
    service.start()
    send_steps(service, 9, 9)
    until(lambda: steps(tmp_path, "Good")[-1:] == [9], "the last row")
    until(lambda: steps(tmp_path, "OnlyWrite")[-1:] == [9], "the last row")
    assert steps(tmp_path, "Good") == steps(tmp_path, "OnlyWrite") == list(range(1, 10))
    first = told(tmp_path, "Good")[0]
    assert first == {"init": "r", "lr": service.config.trainer.lr, "webhook": "http://127.0.0.1:1"}
    assert told(tmp_path, "OnlyWrite")[0]["is_nan"]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("Raising", "Exiting", "Leaving", "Mutating")]


@pytest.mark.parametrize("name", ["Hanging", "Greedy", "Printing", *SLOW])
def test_bad_sink_is_noticed_by_nobody_else(make: Make, tmp_path: Path, name: str) -> None:
    service = start(make, tmp_path, name, "Good", metrics_sink_memory_bytes=512 * 1024 * 1024)
    send_steps(service, 1, 5)
    begun = time.monotonic()
    service.wait_rows(5)
    until(lambda: steps(tmp_path, "Good") == [1, 2, 3, 4, 5], "all rows in the good sink")
    assert time.monotonic() - begun < 5
    states = {sink.name: sink for sink in service.status().sinks}
    assert states["jsonl"].state == "healthy"
    if name in ("Printing", "Mutating"):
        until(lambda: steps(tmp_path, name) == [1, 2, 3, 4, 5], f"all rows in {name}")
    else:
        until(lambda: _behind(service, name) == 5, f"{name} shown as five rows behind")


def _behind(service: MetricsProcess, name: str) -> int:
    (found,) = [sink for sink in service.status().sinks if sink.name == f"{HERE}.{name}"]
    return int(found.num_rows_behind)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Hanging", "Raising"])
def test_service_with_a_bad_sink_ends_in_time(make: Make, tmp_path: Path, name: str) -> None:
    service = start(make, tmp_path, name)
    send_steps(service, 1, 5)
    service.wait_rows(5)
    begun = time.monotonic()
    assert service.stop() == 3
    assert time.monotonic() - begun < 12 + 5


NO_SINKS = [
    (f"{HERE}.Good", ""),
    (f"{HERE}.OnlyWrite", ""),
    (f"{HERE}.NoWrite", "must have a method write(rows)"),
    (f"{HERE}.WrongInit", "is called as init(run, config), but takes"),
    (f"{HERE}.WrongWrite", "is called as write(rows), but takes"),
    (f"{HERE}.NeedsArguments", "is called as NeedsArguments(), but takes"),
    (f"{HERE}.Abstract", "is abstract: write must be defined"),
    (f"{HERE}.Yielding", "write must be a function or a coroutine"),
    (f"{HERE}.function", "must be a class, got function"),
    (f"{HERE}.instance", "must be callable, got Good"),
    (f"{HERE}.Godo", "has no attribute 'Godo'"),
    ("no_such_module.Sink", "module 'no_such_module' was not found"),
    ("Sink", "must be a dotted path"),
]


def test_what_is_no_sink_is_refused_before_a_run_starts() -> None:
    paths = tuple(path for path, _ in NO_SINKS)
    config = RunConfig(run=RunSection(name="r"), metrics=MetricsSection(metrics_sink=paths))
    problems = bad_hooks(config, ["metrics"], {**os.environ, "OWN_SINK": ""})
    found = {problem.value: problem.rule for problem in problems}
    for path, rule in NO_SINKS:
        assert rule in found[path] if rule else path not in found, path
    assert len(problems) == len(NO_SINKS) - 2
