"""The MLflow sink against a real server, and against one that does not answer."""

import json
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from furlong.config import RunConfig
from services.metrics.sinks.mlflow import _status
from services.metrics.sinks.mlflow_names import MAX_PARAM_CHARS, fold_metric, params_of
from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.sinks.mlflow_server import MlflowServer, mlflow_serving

Make = Callable[..., MetricsProcess]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_serving(tmp_path_factory.mktemp("mlflow")) as serving:
        yield serving


@pytest.fixture
def experiment(request: pytest.FixtureRequest) -> str:
    return request.node.name


def losses(first: int, last: int, attempt: int = 1) -> list[bytes]:
    return [part(n, {"train/loss": ["last", 1000 * attempt + n]}, attempt=attempt) for n in range(first, last + 1)]


def started(make: Make, server: MlflowServer, experiment: str, **options: object) -> MetricsProcess:
    return make(mlflow_tracking_uri=server.uri, mlflow_experiment=experiment, **options).start()


def ended(code: int, event: str = "run_ended") -> bytes:
    return b'{"event": "%s", "run": "r", "exit_code": %d}' % (event.encode(), code)


@pytest.mark.tools
def test_values_params_and_end_are_told_truly_in_one_run(make: Make, server: MlflowServer, experiment: str) -> None:
    service = started(
        make, server, experiment, wandb_group="g" * 1000, metrics_webhook="http://127.0.0.1:1/HUSH?k=HUSH"
    )
    values: dict[str, object] = {"eval/x@1": ["last", 0.5], "eval/x#1": ["last", 2], "eval/nan": ["last", "NaN"]}
    send(service, batch([*losses(1, 300), part(7, values, axis="eval/step"), ended(4)]))
    until(lambda: server.runs(experiment), "a run")
    run_id = server.runs(experiment)[0]["info"]["run_id"]
    until(lambda: len(server.history(run_id, "train/loss")) == 300, "300 points")
    until(lambda: server.runs(experiment)[0]["info"]["status"] == "FAILED", "the end")
    service.stop()
    (run,) = server.runs(experiment)
    params = {param["key"]: param["value"] for param in run["data"]["params"]}
    assert len(params["metrics.wandb_group"]) == MAX_PARAM_CHARS and params["run.name"] == "r"
    assert "HUSH" not in json.dumps(run)
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    raw = {tag.removeprefix("furlong.raw_name."): value for tag, value in tags.items() if "raw_name" in tag}
    assert sorted(raw.values()) == ["eval/x#1", "eval/x@1"]
    by_raw = {value: server.history(run_id, folded) for folded, value in raw.items()}
    assert by_raw == {"eval/x@1": [(7, 0.5)], "eval/x#1": [(7, 2)]}
    assert math.isnan(server.history(run_id, "eval/nan")[0][1])


@pytest.mark.tools
def test_kills_leave_each_point_once_and_one_run(make: Make, server: MlflowServer, experiment: str) -> None:
    service = started(make, server, experiment)
    for number in range(4):
        send(service, batch(losses(100 * number + 1, 100 * number + 100), first=100 * number + 1))
        until(lambda: server.runs(experiment), "a run")
        assert service.process is not None
        if number % 2:
            service.kill()
            service.start()
        else:
            children = psutil.Process(service.process.pid).children()
            os.kill(next(c.pid for c in children if "mlflow" in c.cmdline()), signal.SIGKILL)
    (run,) = server.runs(experiment)
    until(lambda: len(server.history(run["info"]["run_id"], "train/loss")) >= 400, "400 points", limit_s=60)
    service.stop()
    assert server.history(run["info"]["run_id"], "train/loss") == [(n, 1000.0 + n) for n in range(1, 401)]
    assert len(server.runs(experiment)) == 1


@pytest.mark.tools
def test_lost_folder_finds_the_run_again_and_a_resume_is_one_curve(
    make: Make, server: MlflowServer, experiment: str
) -> None:
    service = started(make, server, experiment)
    send(service, batch([*losses(0, 150), ended(3)]))
    service.flush()
    service.stop()
    assert [run["info"]["status"] for run in server.runs(experiment)] == ["KILLED"]
    for path in (service.run_dir.metrics_store / "sinks/mlflow").iterdir():
        path.unlink()
    service.start()
    send(service, batch([ended(0, "run_started"), *losses(100, 200, 2), ended(0)], first=153))
    service.flush()
    service.stop()
    (run,) = server.runs(experiment)
    curve = server.curve(run["info"]["run_id"], "train/loss")
    assert curve == [(n, 1000.0 + n if n < 100 else 2000.0 + n) for n in range(201)]
    assert run["info"]["status"] == "FINISHED"
    assert server.curve(run["info"]["run_id"], "train/attempt")[99:101] == [(99, 1), (100, 2)]


@pytest.mark.tools
def test_run_that_was_deleted_there_costs_its_rows_only(make: Make, server: MlflowServer, experiment: str) -> None:
    service = started(make, server, experiment)
    send(service, batch([ended(0, "run_started"), *losses(1, 2)]))
    until(lambda: server.runs(experiment), "a run")
    service.stop()
    server.post("runs/delete", run_id=server.runs(experiment)[0]["info"]["run_id"])
    service.start()
    other = json.loads(losses(1, 1)[0]) | {"run": "other"}
    own = [ended(0, "run_started"), *losses(3, 4), ended(0)]
    send(service, batch([*own, json.dumps(other).encode()], first=4))
    until(lambda: server.runs(experiment), "the other run")
    assert [run["info"]["run_name"] for run in server.runs(experiment)] == ["other"]
    service.flush()
    refused = {sink.name: sink.num_rows_refused for sink in service.status().sinks}
    assert refused["mlflow"] == 2
    service.stop()
    assert '"sink_failing"' not in service.run_dir.log("metrics").read_text()


@pytest.mark.tools
def test_server_that_is_away_when_the_run_ends_is_told_when_it_is_back(
    make: Make, tmp_path: Path, experiment: str
) -> None:
    with mlflow_serving(tmp_path) as server:
        service = started(make, server, experiment)
        send(service, batch(losses(1, 2)))
        service.flush()
    send(service, batch([ended(0)], first=3))
    assert service.stop() == 3
    service.start()
    with mlflow_serving(tmp_path, int(server.uri.rpartition(":")[2])) as server:
        until(lambda: [run["info"]["status"] for run in server.runs(experiment)] == ["FINISHED"], "the end", limit_s=60)
    assert len(service.rows()) == 2


@pytest.mark.slow
def test_server_that_does_not_answer_stops_nobody(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        service = make(mlflow_tracking_uri=address, environment={"MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}).start()
        send(service, batch(losses(1, 5)))
        assert len(service.wait_rows(5)) == 5
        state = lambda: {sink.name: sink for sink in service.status().sinks}["mlflow"]  # noqa: E731
        until(lambda: state().state == "failing", "failing")
        assert service.stop() == 3


def test_names_that_mlflow_refuses_are_folded() -> None:
    names = ["a@b", "a//b", "/a", "a/", "../a", ".", "", "a:b", "ä"]
    assert list(map(fold_metric, names)) == ["a_b", "a/_/b", "_/a", "a/_", "__/a", "_", "_", "a_b", "_"]
    assert fold_metric("rollout/reward/mean_1.x-y z") == "rollout/reward/mean_1.x-y z"


def test_params_are_flat_and_short() -> None:
    params = params_of({"a": {"b": 1, "c": None}, "many": [1, 2], "t": "x" * 999})
    assert params == {"a.b": "1", "a.c": "None", "many": "[1, 2]", "t": "x" * 497 + "..."}
    assert "run.name" in params_of(RunConfig().model_dump(mode="json"))


def test_end_is_told_as_it_was() -> None:
    assert [_status(ended(code)) for code in (0, 3, 4, 1, 7)] == ["FINISHED", "KILLED", "FAILED", "FAILED", "FAILED"]
    assert _status(ended(0, "run_started")) == "RUNNING"
    assert _status(b'{"event": "x", "text": "run_ended"}') == ""
