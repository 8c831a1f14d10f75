"""wandb against a stand-in of its API: down, refusing, hanging and dying, everything arrives, in order, once."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import pytest

from furlong.rundir import RunDir
from services.metrics.rows import RowReader
from services.metrics.sinks.process import SinkProcessFailed
from services.metrics.sinks.sink import Cursor, SinkContext
from services.metrics.sinks.wandb_sink import make as make_wandb
from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.wandb_api import KEY, WandbApi, wait_steps

Make = Callable[..., MetricsProcess]
FAST = {"WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1", "TEST_WANDB_LOOK_S": "0.3"}


@pytest.fixture
def api() -> Iterator[WandbApi]:
    with WandbApi() as made:
        yield made


def online(make: Make, api: WandbApi, **options: object) -> MetricsProcess:
    options = {"use_wandb": True, "wandb_project": "p", "wandb_mode": "online", "wandb_init_timeout_s": 3.0, **options}
    return make(environment={**FAST, **api.environment}, **options)


def send_steps(service: MetricsProcess, first: int, last: int) -> None:
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(first, last + 1)], first=first))


def state_of(service: MetricsProcess, name: str = "wandb") -> tuple[str, int]:
    (found,) = [sink for sink in service.status().sinks if sink.name == name]
    return found.state, found.num_rows_behind


@pytest.mark.slow
def test_run_is_whole_named_and_resumed(make: Make, api: WandbApi) -> None:
    service = online(make, api, wandb_group="g", wandb_team="team", wandb_run_name="shown").start()
    send_steps(service, 1, 3)
    wait_steps(api, [1, 2, 3])
    service.stop()
    service.start()
    send_steps(service, 4, 6)
    wait_steps(api, [1, 2, 3, 4, 5, 6])
    service.stop()
    run = api.only_run()
    assert (run.project, run.group, run.entity, run.display_name) == ("p", "g", "team", "shown")
    assert run.axes()["train/*"] == "train/step" and run.axes()["engine/*"] == "engine/time"
    assert run.config["run"]["value"]["name"] == "r"


def test_last_row_arrives_though_none_follows(make: Make, api: WandbApi) -> None:
    service = online(make, api).start()
    send_steps(service, 1, 1)
    wait_steps(api, [1])
    until(lambda: state_of(service) == ("healthy", 0), "wandb healthy and up to date")


@pytest.mark.slow
def test_wandb_that_refuses_at_init_gets_everything_when_it_is_back(make: Make, api: WandbApi) -> None:
    api.down()
    service = online(make, api).start()
    send_steps(service, 1, 5)
    assert [row["step"] for row in service.wait_rows(5)] == [1, 2, 3, 4, 5]
    until(lambda: state_of(service) == ("failing", 5), "wandb failing, five rows behind")
    assert state_of(service, "jsonl") == ("healthy", 0)
    api.up()
    wait_steps(api, [1, 2, 3, 4, 5], limit_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("code", [401, 403, 500, 503])
def test_init_that_is_answered_with_an_error_is_tried_again(make: Make, api: WandbApi, code: int) -> None:
    api.status = lambda what: code if what.startswith("graphql") else 200
    service = online(make, api).start()
    send_steps(service, 1, 3)
    until(lambda: state_of(service) == ("failing", 3), "wandb failing")
    service.wait_rows(3)
    api.status = lambda what: 200
    wait_steps(api, [1, 2, 3], limit_s=60)


@pytest.mark.slow
def test_wandb_that_hangs_at_init_holds_up_nothing(make: Make, api: WandbApi) -> None:
    api.hangs = lambda what: what == "graphql UpsertBucket"
    service = online(make, api).start()
    send_steps(service, 1, 3)
    service.wait_rows(3)
    begun = time.monotonic()
    assert service.stop() == 3
    assert time.monotonic() - begun < 12 + 5  # the drain budget
    api.down()
    api.hangs = lambda what: False
    api.up()
    service.start()
    wait_steps(api, [1, 2, 3], limit_s=60)


@pytest.mark.slow
def test_wandb_that_hangs_at_init_past_its_limit_is_ended_and_tried_again(make: Make, api: WandbApi) -> None:
    api.hangs = lambda what: what == "graphql UpsertBucket"
    service = online(make, api).start()
    send_steps(service, 1, 3)
    assert service.process is not None
    own = psutil.Process(service.process.pid)
    until(lambda: len(own.children(recursive=True)) >= 2, "the sink's process and wandb's own")
    first = own.children(recursive=True)
    until(lambda: state_of(service) == ("failing", 3), "wandb failing", limit_s=40)
    until(lambda: not any(process.is_running() for process in first), "the end of the first try")
    api.down()
    api.hangs = lambda what: False
    api.up()
    wait_steps(api, [1, 2, 3], limit_s=60)
    until(lambda: state_of(service) == ("healthy", 0), "wandb healthy")
    assert len(api.runs) == 1


def test_wandb_that_dies_in_mid_run_misses_nothing(make: Make, api: WandbApi) -> None:
    service = online(make, api).start()
    send_steps(service, 1, 3)
    wait_steps(api, [1, 2, 3])
    until(lambda: state_of(service) == ("healthy", 0), "wandb healthy")
    api.down()
    send_steps(service, 4, 6)
    service.wait_rows(6)
    until(lambda: state_of(service) == ("failing", 3), "wandb failing, three rows behind")
    api.up()
    wait_steps(api, [1, 2, 3, 4, 5, 6], limit_s=60)
    until(lambda: state_of(service) == ("healthy", 0), "wandb healthy again")
    assert len(api.runs) == 1


@pytest.mark.slow
def test_wandb_that_hangs_at_finish_is_left_and_gets_the_rest_at_the_next_start(make: Make, api: WandbApi) -> None:
    service = online(make, api).start()
    send_steps(service, 1, 3)
    wait_steps(api, [1, 2, 3])
    api.hangs = lambda what: what == "file_stream"
    send_steps(service, 4, 6)
    service.wait_rows(6)
    begun = time.monotonic()
    assert service.stop() == 3
    assert time.monotonic() - begun < 12 + 5
    api.down()
    api.hangs = lambda what: False
    api.up()
    service.start()
    wait_steps(api, [1, 2, 3, 4, 5, 6], limit_s=60)


@pytest.mark.slow
def test_wandb_whose_sender_gave_up_is_started_anew(make: Make, api: WandbApi) -> None:
    """wandb takes a 404 of its stream for final, and would send nothing any more."""
    service = make(
        environment={**FAST, **api.environment, "TEST_WANDB_STUCK_S": "2"}, use_wandb=True, wandb_mode="online"
    ).start()
    send_steps(service, 1, 3)
    wait_steps(api, [1, 2, 3])
    api.status = lambda what: 404 if what == "file_stream" else 200
    send_steps(service, 4, 6)
    until(lambda: state_of(service)[0] == "failing", "wandb failing")
    api.status = lambda what: 200
    wait_steps(api, [1, 2, 3, 4, 5, 6], limit_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["handed", "delivered"])
def test_service_that_is_killed_resumes_the_run_without_gaps_or_doubles(make: Make, api: WandbApi, moment: str) -> None:
    service = online(make, api).start()
    send_steps(service, 1, 30)
    service.flush() if moment == "handed" else wait_steps(api, list(range(1, 31)))
    service.kill()
    service.start()
    send_steps(service, 31, 60)
    wait_steps(api, list(range(1, 61)))
    assert len(api.runs) == 1


@pytest.mark.slow
def test_sink_process_that_is_killed_is_started_anew_and_nothing_is_lost(make: Make, api: WandbApi) -> None:
    service = online(make, api).start()
    send_steps(service, 1, 3)
    service.flush()
    assert service.process is not None
    for child in psutil.Process(service.process.pid).children(recursive=True):
        child.kill()
    send_steps(service, 4, 6)
    wait_steps(api, [1, 2, 3, 4, 5, 6], limit_s=60)


@pytest.mark.slow
def test_run_that_began_offline_is_whole_once_it_is_online(make: Make, api: WandbApi) -> None:
    service = online(make, api, wandb_mode="offline").start()
    send_steps(service, 1, 3)
    service.flush()
    service.stop()
    assert api.requests == []
    online_too = online(make, api).start()
    send_steps(online_too, 4, 6)
    wait_steps(api, [1, 2, 3, 4, 5, 6])


@pytest.mark.slow
def test_run_that_was_synced_by_hand_goes_on_online_without_doubles(make: Make, api: WandbApi) -> None:
    service = online(make, api, wandb_mode="offline").start()
    send_steps(service, 1, 3)
    service.flush()
    service.stop()
    (folder,) = service.run_dir.root.glob("wandb/offline-run-*")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(service.run_dir.root), **api.environment}
    sync = [str(Path(sys.executable).with_name("wandb")), "sync", str(folder)]
    subprocess.run(sync, env=environment, check=True, timeout=60, capture_output=True)
    assert api.steps() == [1, 2, 3]
    online_too = online(make, api).start()
    send_steps(online_too, 4, 6)
    wait_steps(api, [1, 2, 3, 4, 5, 6])


def test_key_is_in_no_argument_log_config_or_answer(make: Make, api: WandbApi, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    environment = {**FAST, "WANDB_BASE_URL": api.url, "WANDB_API_KEY_FILE": str(tmp_path / "key")}
    service = make(environment=environment, use_wandb=True, wandb_mode="online").start()
    send_steps(service, 1, 3)
    wait_steps(api, [1, 2, 3])
    assert any("YXBpOmtra2" in given for given in api.authorizations)  # api:kkk... in base 64
    assert service.process is not None
    family = [psutil.Process(service.process.pid), *psutil.Process(service.process.pid).children(recursive=True)]
    assert len(family) >= 3  # the service, the sink's process, wandb's own
    assert [process for process in family if KEY in " ".join(process.cmdline())] == []
    service.stop()
    files = [path for path in service.run_dir.root.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path.name for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in json.dumps(api.only_run().config)


@dataclass(frozen=True)
class Alert:
    """As the alert engine has it."""

    run: str = "r"
    rule: str = "loss_spike"
    severity: str = "critical"
    summary: str = "the loss is 40"
    remedy: str = "Lower the rate."


async def test_alert_reaches_wandb_once_and_other_runs_do_not(
    api: WandbApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in api.environment.items():
        monkeypatch.setenv(name, value)
    run_dir = RunDir(tmp_path).create()
    reader = cast("RowReader", Empty())
    context = SinkContext("wandb", run_dir, tmp_path / "own", tmp_path / "log", 5.0, reader, run="r")
    sink = make_wandb({"mode": "online"}, context)
    with pytest.raises(SinkProcessFailed):
        await sink.alert(Alert())
    await sink.start(Cursor(0))
    await sink.alert(Alert())
    await sink.alert(Alert(run="other"))
    await sink.finish()
    await sink.alert(Alert())  # too late
    (alert,) = api.only_run().alerts
    assert (alert["title"], alert["severity"]) == ("loss_spike: r", "ERROR")
    assert alert["text"] == "the loss is 40\n\nLower the rate."


class Empty:
    """A reader of an empty store."""

    def last_row_id(self) -> int:
        return 0

    def cursor(self, sink: str) -> tuple[int, int]:
        return 0, 0


@pytest.mark.slow
def test_table_arrives_and_one_that_wandb_breaks_on_costs_only_itself(make: Make, api: WandbApi) -> None:
    """The real program ends in a crash when the server answers the table's upload with nothing."""
    api.breaks_tables = True
    environment = {**FAST, **api.environment, "TEST_WANDB_STUCK_S": "2"}
    service = make(environment=environment, use_wandb=True, wandb_mode="online").start()
    table: dict[str, object] = {"train/loss": ["last", 1], "train/t": ["table", ["a"], [[1]]]}
    send(service, batch([part(1, table), part(2, {"train/loss": ["last", 2]})]))
    wait_steps(api, [1, 2], limit_s=90)
    api.breaks_tables = False
    send(service, batch([part(3, table)], first=3))
    wait_steps(api, [1, 2, 3])
    last = api.only_run().points[-1]
    assert last["train/t"]["nrows"] == 1 and "train/t" not in api.only_run().points[0]


@pytest.mark.slow
def test_suspended_wandb_holds_up_nothing(make: Make, api: WandbApi) -> None:
    service = online(make, api).start()
    send_steps(service, 1, 3)
    wait_steps(api, [1, 2, 3])
    assert service.process is not None
    children = psutil.Process(service.process.pid).children(recursive=True)
    for child in children:
        child.send_signal(signal.SIGSTOP)
    send_steps(service, 4, 6)
    service.wait_rows(6)
    for child in children:
        child.send_signal(signal.SIGCONT)
    wait_steps(api, [1, 2, 3, 4, 5, 6])
