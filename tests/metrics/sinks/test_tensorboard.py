"""The TensorBoard sink in the service, read back from its files."""

import json
import os
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # Any: what JSON holds

import psutil
import pytest

from tests import tools
from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.sinks.event_files import by_rule, by_tensorboard

Make = Callable[..., MetricsProcess]


def losses(first: int, last: int, attempt: int) -> list[bytes]:
    return [part(n, {"train/loss": ["last", 1000 * attempt + n]}, attempt=attempt) for n in range(first, last + 1)]


def folder_of(service: MetricsProcess) -> Path:
    return service.run_dir.root / "tensorboard"


def child_pid(service: MetricsProcess) -> int:
    assert service.process is not None
    children = psutil.Process(service.process.pid).children()
    return next(child.pid for child in children if "tensorboard" in child.cmdline())


def test_axes_have_folders_and_histograms_and_tables_are_there(make: Make) -> None:
    service = make(use_tensorboard=True).start()
    values: dict[str, object] = {
        "rollout/raw_reward": ["mean", 3, 2],
        "rollout/lengths": ["histogram", [0, 1, 2], [3, 4]],
        "rollout/worst": ["table", ["text", "n"], [["a|b", 1]]],
    }
    send(service, batch([part(5, {"train/loss": ["last", "NaN"]}), part(1, values, axis="rollout/step")]))
    service.flush()
    service.stop()
    found = by_rule(folder_of(service) / "r")
    assert set(found) == {"train/train/loss", "train/train/loss/nonfinite", "rollout/rollout/raw_reward"}
    assert found["rollout/rollout/raw_reward"] == [(1, 1.5)]
    content = b"".join(path.read_bytes() for path in folder_of(service).rglob("*tfevents*"))
    assert b"rollout/lengths" in content and b"a\\|b" in content


@pytest.mark.tools
def test_service_and_sink_killed_at_any_moment_leave_each_value_once(make: Make) -> None:
    service = make(use_tensorboard=True).start()
    sent = 0
    for number in range(6):
        for _ in range(3):
            send(service, batch(losses(sent + 1, sent + 50, 1), first=sent + 1))
            sent += 50
        until(lambda: by_rule(folder_of(service)), "a value")
        if number % 2:
            os.kill(child_pid(service), signal.SIGKILL)
        else:
            service.kill()
            service.start()
    until(lambda: len(by_rule(folder_of(service)).get("r/train/train/loss", [])) >= sent, f"{sent} values")
    service.stop()
    assert by_tensorboard(folder_of(service)) == {"r/train/train/loss": [(n, 1000.0 + n) for n in range(1, sent + 1)]}


@pytest.mark.tools
def test_resume_behind_the_last_step_is_one_curve_in_tensorboard(make: Make) -> None:
    service = make(use_tensorboard=True).start()
    send(service, batch(losses(0, 150, 1)))
    service.flush()
    service.kill()
    service.start()
    send(service, batch(losses(100, 200, 2), first=152))
    late = [part(n, {"train/late": ["last", n]}, part="late") for n in (60, 50)]  # the second goes behind the first
    send(service, batch(late, producer="r/late"))
    service.flush()
    service.stop()
    curve = [(n, 1000.0 + n if n < 100 else 2000.0 + n) for n in range(201)]
    found = {"r/train/train/loss": curve, "r/train/train/late": [(50, 50.0), (60, 60.0)]}
    assert by_tensorboard(folder_of(service)) == found
    with tensorboard_serving(folder_of(service)) as ask:
        until(lambda: "r/train" in ask("data/plugin/scalars/tags"), "the run in TensorBoard")
        for tag in ("train/loss", "train/late"):
            shown = ask("data/plugin/scalars/scalars", run="r/train", tag=tag)
            assert [(step, value) for _, step, value in shown] == found[f"r/train/{tag}"]


@contextmanager
def tensorboard_serving(folder: Path) -> Generator[Callable[..., Any]]:
    """Asks TensorBoard's own HTTP API."""
    tool = tools.need("tensorboard")
    log_path = folder.parent / "tensorboard.log"
    with log_path.open("w") as log:
        command = [*tool.command, "--logdir", str(folder), "--port", "0", "--samples_per_plugin", "scalars=10000"]
        process = subprocess.Popen([*command, "--reload_interval", "1"], stdout=log, stderr=log, env=tool.environment)

    def base() -> str:
        line = next((line for line in log_path.read_text().splitlines() if "http://" in line), "")
        return line.partition("http://")[2].split(" ")[0]

    def ask(path: str, **query: str) -> Any:
        url = f"http://{base()}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    try:
        until(base, "TensorBoard listening", limit_s=60)
        yield ask
    finally:
        process.terminate()
        process.wait(20)
