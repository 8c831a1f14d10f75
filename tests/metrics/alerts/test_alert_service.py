"""Alerts of a real metrics service: kept, told once, over kills; streams, file, webhooks."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from furlong.alertwatch import UNWATCHED_KEY
from furlong.v1 import metrics_pb2
from services.metrics.alerts.targets import last_id
from tests.metrics.running import LIMIT_S, MetricsProcess, batch, part, send, until

Make = Callable[..., MetricsProcess]
FIRING, RESOLVED = metrics_pb2.Alert.FIRING, metrics_pb2.Alert.RESOLVED


def step(number: int, loss: float | str, *, attempt: int = 1) -> bytes:
    return part(number, {"train/loss": ["mean", loss, 1]}, attempt=attempt)


def good(first: int, count: int) -> list[bytes]:
    return [step(number, 0.1) for number in range(first, first + count)]


def watch(service: MetricsProcess, *, after_id: int = 0, attempt: int = 0, run: str = "r") -> Any:
    request = metrics_pb2.WatchAlertsRequest(run=run, after_id=after_id, attempt=attempt)
    return service.stub().WatchAlerts(request, timeout=LIMIT_S)


def file_of(service: MetricsProcess) -> list[tuple[int, str, str]]:
    path = service.run_dir.alerts
    lines = path.read_text().splitlines() if path.exists() else []
    return [(tree["id"], tree["rule"], tree["state"]) for tree in map(json.loads, lines)]


def test_an_alert_reaches_who_watches_and_the_file(make: Make) -> None:
    service = make(halt_on=("loss_nonfinite",)).start()
    stream = watch(service)
    send(service, batch([step(1, 0.1), step(2, "NaN")]))
    alert = next(stream)
    assert (alert.rule, alert.state, alert.axis, alert.step) == ("loss_nonfinite", FIRING, "train/step", 2)
    assert alert.halt and alert.diverged and alert.attempt == 1 and "train/loss is nan" in alert.summary
    assert json.loads(alert.evidence)["values"] == [0.1, "NaN"]
    until(lambda: file_of(service) == [(alert.id, "loss_nonfinite", "firing")], "the alert in alerts.jsonl")
    assert service.stop() == 3


def test_over_kills_an_alert_is_told_once_and_its_end_too(make: Make) -> None:
    service = make().start()
    send(service, batch([step(number, 0.1) for number in range(30)] + [step(30, "NaN")]))
    assert next(watch(service)).state == FIRING
    service.kill()
    service.start()
    assert next(watch(service)).step == 30  # it still fires
    send(service, batch([step(31, "NaN"), *good(32, 10)], first=32))
    service.kill()
    service.start()
    stream = watch(service)
    send(service, batch(good(42, 10), first=43))
    ended = next(alert for alert in stream if alert.state == RESOLVED)
    assert ended.step == 51  # the good rows before the kill count
    until(lambda: len(file_of(service)) >= 2, "both in alerts.jsonl")
    assert [state for _, _, state in file_of(service)] == ["firing", "resolved"]


def test_windows_are_rebuilt_after_a_kill(make: Make) -> None:
    service = make().start()
    send(service, batch([step(number, 0.01 * (number % 5)) for number in range(60)]))
    service.kill()
    service.start()
    stream = watch(service)
    send(service, batch([step(60, 9.0), step(61, 9.0)], first=61))
    assert next(stream).rule == "loss_spike"


def test_what_was_not_judged_when_it_was_killed_is_judged_later(make: Make) -> None:
    service = make(disable_alerts=("loss_nonfinite",)).start()
    send(service, batch([step(1, 0.1), step(2, "NaN")]))
    service.wait_row(2)
    service.stop()
    again = make().start()  # the same run directory, all rules
    assert file_of(again) == []  # that row was judged
    send(again, batch([step(3, "NaN")], first=3))
    until(lambda: [rule for _, rule, _ in file_of(again)] == ["loss_nonfinite"], "the alert of the third row")


def test_a_late_amendment_does_not_fire_twice(make: Make) -> None:
    service = make().start()
    first = part(1, {"train/loss": ["mean", "NaN", 1]}, part="a", parts=("a", "b"))
    send(service, batch([first, part(1, {"train/x": ["last", 1]}, part="b", parts=("a", "b"))]))
    send(service, batch([part(1, {"train/y": ["last", 1]}, part="c", parts=("a", "b"))], first=3))
    send(service, batch([step(2, 0.1)], first=4))
    service.wait_row(2)
    until(lambda: len(file_of(service)) == 1, "one alert")
    service.stop()
    assert len(file_of(service)) == 1


def test_an_earlier_attempts_alert_is_not_told_to_a_new_one(make: Make) -> None:
    service = make().start()
    send(service, batch([step(1, "NaN")]))
    assert next(watch(service)).attempt == 1
    stream = watch(service, attempt=2)
    send(service, batch([step(1, 0.1, attempt=2), step(2, "NaN", attempt=2)], first=2))
    told = next(stream)
    assert (told.state, told.attempt, told.step) == (FIRING, 2, 2)


def test_watching_one_run_tells_nothing_of_another(make: Make) -> None:
    service = make().start()
    other = watch(service, run="other")
    send(service, batch([step(1, "NaN")]))
    assert next(watch(service)).run == "r"
    other.cancel()
    with pytest.raises(grpc.RpcError):
        next(other)


def test_rules_that_cannot_be_used_end_the_start(make: Make, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[rules.loss_spike]\nsigma = 1")
    service = make(alert_rules=str(rules))
    with pytest.raises(AssertionError, match=r"rules\.loss_spike\.sigma = 1"):
        service.start()
    assert service.process is not None and service.process.returncode == 2


class Hook:
    """An HTTP server that takes alerts, or answers as it is told."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.num_got = 0
        """GETs: what follows a redirect."""
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code = hook.answers.pop(0) if hook.answers else 200
                if code == 200:
                    hook.bodies.append(body)
                self.send_response(code)
                if 300 <= code < 400:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                hook.num_got += 1
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook-secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    one = Hook()
    yield one
    one.server.shutdown()
    one.server.server_close()


def test_webhooks_get_alerts_in_their_shapes_and_no_url_is_logged(make: Make, hook: Hook, tmp_path: Path) -> None:
    secret = tmp_path / "slack"
    secret.write_text(f"{hook.url}\n")
    service = make(alert_webhook=hook.url.replace("secret", "plain"), alert_slack_webhook_file=str(secret)).start()
    send(service, batch([step(1, "NaN")]))
    until(lambda: len(hook.bodies) == 2, "both webhooks")
    plain, slack = sorted(hook.bodies, key=lambda body: "attachments" in body)
    assert plain["rule"] == "loss_nonfinite" and plain["evidence"]["values"] == ["NaN"] and plain["at"]
    assert slack["text"].startswith("[r] critical loss_nonfinite: ") and slack["attachments"][0]["color"] == "danger"
    service.stop()
    files = [path for path in service.run_dir.root.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hook-secret" in path.read_bytes()]


def test_a_webhook_that_was_away_gets_every_alert_in_order(make: Make, hook: Hook) -> None:
    hook.answers = [503, 503]
    service = make(alert_webhook=hook.url).start()
    send(service, batch([step(1, "NaN"), *good(2, 20), step(22, "NaN")]))
    until(lambda: len(hook.bodies) == 3, "three alerts")
    assert [body["state"] for body in hook.bodies] == ["firing", "resolved", "firing"]
    assert [body["id"] for body in hook.bodies] == sorted({body["id"] for body in hook.bodies})


def test_an_alert_that_a_webhook_never_takes_is_left_out(make: Make, hook: Hook) -> None:
    hook.answers = [400]
    service = make(alert_webhook=hook.url).start()
    send(service, batch([step(1, "NaN"), *good(2, 20)]))
    until(lambda: len(hook.bodies) == 1, "the second alert")
    assert hook.bodies[0]["state"] == "resolved"


def test_a_webhook_that_redirects_has_not_taken_the_alert(make: Make, hook: Hook) -> None:
    hook.answers = [302, 301]
    service = make(alert_webhook=hook.url).start()
    send(service, batch([step(1, "NaN")]))
    until(lambda: hook.bodies, "the alert, once the address is right")
    assert (len(hook.bodies), hook.answers, hook.num_got) == (1, [], 0)


def test_the_environments_proxy_is_not_for_a_webhook_on_this_machine(make: Make, hook: Hook) -> None:
    service = make(alert_webhook=hook.url, environment={"http_proxy": "http://127.0.0.1:9"}).start()
    send(service, batch([step(1, "NaN")]))
    until(lambda: hook.bodies, "the alert")


@pytest.mark.slow
def test_a_webhook_that_hangs_slows_nobody(make: Make, hook: Hook) -> None:
    stuck = threading.Event()

    class Stuck(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            stuck.set()
            threading.Event().wait(30)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stuck)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    service = make(alert_webhook=f"http://127.0.0.1:{server.server_port}/").start()
    stream = watch(service)
    send(service, batch([step(1, "NaN")]))
    assert stuck.wait(LIMIT_S)
    assert next(stream).rule == "loss_nonfinite"
    send(service, batch([step(2, 0.1)], first=2))
    service.wait_row(2)
    begun = time.monotonic()
    assert service.stop() == 3 and time.monotonic() - begun < 7
    server.shutdown()
    server.server_close()


def test_a_torn_line_of_the_file_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "alerts.jsonl"
    path.write_bytes(b'{"id":4}\n{"id":5,"ru')
    assert last_id(path) == 4 and path.read_bytes().endswith(b'{"id":5,"ru\n')
    assert last_id(tmp_path / "none") == 0


PRODUCER = """
import sys, time
from pathlib import Path
from furlong.config import RunConfig
from furlong.rundir import RunDir
from furlong.telemetry import Telemetry
config = RunConfig.model_validate_json(Path(sys.argv[1]).read_bytes())
telemetry = Telemetry.for_run(config, RunDir(Path(config.run.run_dir)), service="rollout", instance="rollout")
telemetry.record({"event": "service_ready"})
print(telemetry.flush(20), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_is_told_as_gone_and_one_that_ends_is_not(
    make: Make, tmp_path: Path, number: signal.Signals
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[rules.service_gone]\ntimes = 1.2\nmin_s = 1")
    service = make(alert_rules=str(rules)).start()
    ends = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    command = [sys.executable, "-c", ends + PRODUCER, str(service._config_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"True\n"
        process.send_signal(number)
    told = watch(service, run="r")
    if number == signal.SIGKILL:
        assert "rollout has sent nothing" in next(told).summary
    else:
        with pytest.raises(grpc.RpcError):  # the time of the call is up
            next(told)


def test_a_killed_producer_is_told_as_gone(make: Make, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[rules.service_gone]\ntimes = 1.5\nmin_s = 1")
    service = make(alert_rules=str(rules)).start()
    stream = watch(service)
    beat = json.dumps(
        {"event": "heartbeat", "run": "r", "instance": "rollout", "every_s": 1, "num_dropped": {}}
    ).encode()
    send(service, batch([beat], producer="r/rollout"))
    gone = next(stream)
    assert gone.rule == "service_gone" and "rollout" in gone.summary and gone.severity == "critical"


def test_who_watches_is_told_at_once_which_rules_nobody_watches(make: Make) -> None:
    service = make(disable_alerts=("loss_spike",)).start()
    names = ("loss_spike", "loss_nonfinite", "mine")
    stream = service.stub().WatchAlerts(metrics_pb2.WatchAlertsRequest(run="r", halt_on=names), timeout=LIMIT_S)
    assert json.loads(dict(stream.initial_metadata())[UNWATCHED_KEY]) == ["loss_spike", "mine"]
    stream.cancel()
