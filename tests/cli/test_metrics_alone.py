"""`furlong metrics` without a run: what it takes and refuses, and that many runs share it."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from furlong.config import RunConfig
from furlong.config.sections import MetricsSection, RunSection
from furlong.records import Last
from furlong.rundir import RunDir
from furlong.telemetry import Telemetry
from tests.cli.started_alone import Alone
from tests.cli.test_main import furlong
from tests.metrics.asking import get, post


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    service = Alone(tmp_path_factory.mktemp("alone") / "kept")
    yield service
    service.end()


def test_first_line_says_where_it_is_and_what_to_do(alone: Alone) -> None:
    said = alone.said()
    assert alone.http in said and f"gRPC {alone.grpc}" in said and str(alone.folder) in said
    assert f"curl {alone.http}/v1/records" in said and f"furlong tail --url {alone.http}" in said


def test_second_service_in_a_folder_is_refused_naming_the_first(alone: Alone) -> None:
    done = furlong("metrics", "--port", "0", "--dir", str(alone.folder))
    assert done.returncode == 2 and f"pid {alone.process.pid}" in done.stderr
    assert done.stderr.startswith("furlong: this cannot run:\n  metrics folder") and len(done.stderr.splitlines()) == 2


def test_taken_port_is_told(alone: Alone, tmp_path: Path) -> None:
    port = alone.http.rpartition(":")[2]
    done = furlong("metrics", "--port", port, "--dir", str(tmp_path / "other"))
    assert done.returncode == 2 and f":{port}" in done.stderr and "in use" in done.stderr
    assert done.stderr.startswith("furlong: this cannot run:\n  cannot listen") and len(done.stderr.splitlines()) == 2
    log = (tmp_path / "other" / "logs" / "metrics.jsonl").read_text()
    assert "service_failed" in log


def test_help_lists_its_own_flags() -> None:
    said = furlong("metrics", "--help").stdout
    assert all(f"│ --{name} " in said for name in ("port INT", "host STR", "dir STR"))


def test_port_of_grpc_is_the_next_one(tmp_path: Path) -> None:
    port = two_free_ports()
    service = Alone(tmp_path / "kept", port=port)
    try:
        assert service.grpc == f"127.0.0.1:{port + 1}"
    finally:
        assert service.end() == 3


def two_free_ports() -> int:
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "x"], "whole number"),
        (["--port", "0", "--dir", "/dev/null/x"], "--dir = '/dev/null/x'"),
        (["--port", "65536"], "0 to 65535"),
        (["--port", "1", "--config", "run.toml"], "service of no run"),
        (["--port", "1", "--lr", "3"], "--lr"),
        (["--host", "0.0.0.0"], "loopback"),
        (["--port", "1", "--metrics-grpc-port", "1"], "--metrics-grpc-port"),
        (["--prot", "3"], "Did you mean --port?"),
        (["--port", "1", "--hots", "x"], "Did you mean --host?"),
        (["--wandb-key", "secret"], "no flag takes a secret"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: list[str], said: str, tmp_path: Path) -> None:
    done = furlong("metrics", *flags, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_runs_of_furlong_and_of_others_are_told_apart(alone: Alone, tmp_path: Path) -> None:
    for name in ("one", "two"):
        config = RunConfig(run=RunSection(name=name), metrics=MetricsSection(metrics_addr=alone.grpc))
        telemetry = Telemetry.for_run(config, RunDir(tmp_path / name).create(), service="trainer", instance="trainer-0")
        telemetry.metrics("train/step", 7, {"train/loss": Last(len(name))}, part="trainer", parts=["trainer"])
        telemetry.record({"event": f"hello_from_{name}"})
        assert telemetry.close(10)
    post(alone.http, b'{"run": "theirs", "event": "hello"}')
    assert {"one", "two", "theirs"} <= {run["run"] for run in get(alone.http, "/api/runs")["runs"]}
    assert [row["run"] for row in get(alone.http, "/api/rows?run=one")["rows"]] == ["one"]
    assert [line["record"]["event"] for line in get(alone.http, "/api/logs?run=two")["logs"]] == ["hello_from_two"]


def test_run_of_the_default_name_is_refused_with_a_shared_service(tmp_path: Path) -> None:
    done = furlong("config", "--metrics-addr", "127.0.0.1:1", "--hf-checkpoint", "x", "--use-wandb")
    assert done.returncode == 2 and "run.name" in done.stderr and "metrics.use_wandb" in done.stderr


def test_status_shows_a_service_of_no_run(alone: Alone) -> None:
    done = furlong("status", "--run-dir", str(alone.folder))
    assert done.returncode == 0 and "of no run" in done.stdout and alone.http in done.stdout
