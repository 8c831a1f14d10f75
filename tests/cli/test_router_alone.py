"""`furlong router` without a run: what it takes and refuses, sgl-router's command line, and how it ends."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from furlong.cli.alone import is_alone, read_alone
from furlong.config import ConfigError
from furlong.config.sections import RouterSection
from furlong.config.sglrouter import INSTEAD, RENAMED, SWITCHES, VALUES
from furlong.process import ExitCode
from furlong.rpc import is_serving
from tests.cli.started_alone import Alone
from tests.cli.test_main import furlong
from tests.metrics.running import until


class Engine(BaseHTTPRequestHandler):
    """Answers everything well, with what it was asked."""

    def do_GET(self) -> None:
        self._answer(self.path.encode())

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"])))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Alone]:
    service = Alone(tmp_path_factory.mktemp("alone") / "kept", "--worker-urls", engine, service="router")
    yield service
    service.end()


def ask(url: str, body: bytes | None = None, **headers: str) -> bytes:
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


def config(*words: str) -> RouterSection:
    return read_alone("router", ["--port", "0", *words])[0].router


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*words)
    return str(caught.value)


def test_it_serves_the_workers_of_its_command_line(alone: Alone) -> None:
    until(lambda: b'"READY"' in ask(f"{alone.http}/workers"), "the worker is ready")
    assert ask(f"{alone.http}/generate", b'{"text": "hello"}') == b'{"text": "hello"}'


def test_first_lines_say_where_it_is_and_what_to_do(alone: Alone) -> None:
    said = alone.said()
    assert str(alone.folder) in said and "gRPC" not in said
    assert f"curl {alone.http}/workers" in said and "/v1/chat/completions" in said


@pytest.mark.parametrize("flag", ["--grpc-port=0", "--require-policy-version"])
def test_it_answers_grpc_when_that_is_asked_for(tmp_path: Path, flag: str) -> None:
    service = Alone(tmp_path / "kept", flag, service="router")
    try:
        assert f"gRPC {service.grpc}" in service.said()
        assert is_serving(service.grpc, "furlong.v1.Router", timeout_s=5.0)
    finally:
        service.end()


def test_a_second_router_in_a_folder_is_refused_naming_the_first(alone: Alone) -> None:
    done = furlong("router", "--port", "0", "--dir", str(alone.folder))
    assert done.returncode == ExitCode.BAD_CONFIG and f"pid {alone.process.pid}" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_a_taken_port_is_told(alone: Alone, tmp_path: Path) -> None:
    port = alone.http.rpartition(":")[2]
    done = furlong("router", "--port", port, "--dir", str(tmp_path / "other"))
    assert done.returncode == ExitCode.BAD_CONFIG and f":{port}" in done.stderr and "in use" in done.stderr


def test_status_shows_it(alone: Alone) -> None:
    done = furlong("status", "--run-dir", str(alone.folder))
    assert done.returncode == 0 and "router service of no run" in done.stdout and alone.http in done.stdout


def test_nothing_gathers_in_the_spool(alone: Alone) -> None:
    assert list((alone.folder / "spool").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_peace(tmp_path: Path, number: signal.Signals) -> None:
    service = Alone(tmp_path / "kept", service="router")
    assert service.end(number) == ExitCode.DRAINED and "Traceback" not in service.said()
    assert "furlong router stops" in service.said()


def test_help_shows_flags_without_the_prefix() -> None:
    said = furlong("router", "--help").stdout
    assert all(f"│ --{name} " in said for name in ("port INT", "worker-urls", "max-in-flight INT", "token-file STR"))
    assert "--router-worker-urls" not in said


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        ("", True),
        ("--worker-urls http://a:1", True),
        ("--router-policy prefix", True),
        ("--router-port 30000", True),
        ("--port 3 --hf-checkpoint m", True),
        ("--config run.toml --router-port 3", False),
        ("--hf-checkpoint m", False),
        ("--rank 0", False),
    ],
)
def test_what_is_alone(words: str, is_one: bool) -> None:
    assert is_alone("router", words.split()) is is_one


def test_flags_are_taken_with_and_without_the_prefix() -> None:
    for prefix in ("--", "--router-"):
        section = config(
            f"{prefix}max-in-flight", "3", f"{prefix}processes=2", f"{prefix}worker-urls", "http://a", "http://b"
        )
        assert (section.router_max_in_flight, section.router_processes) == (3, 2)
        assert section.router_worker_urls == ("http://a", "http://b")


def test_policy_versions_are_asked_for_only_when_said() -> None:
    assert not config().router_require_policy_version
    assert config("--require-policy-version").router_require_policy_version
    assert not config("--no-router-require-policy-version").router_require_policy_version


@pytest.mark.parametrize(
    ("theirs", "field", "value"),
    [
        ("--policy cache_aware", "policy", "prefix"),
        ("--router-policy=round_robin", "policy", "round-robin"),
        ("--policy power_of_two", "policy", "power-of-two"),
        ("--request-timeout-secs 60", "total_timeout_s", 60.0),
        ("--queue-timeout-secs 5", "queue_timeout_s", 5.0),
        ("--retry-max-retries 2", "max_tries", 2),
        ("--disable-retries", "max_tries", 1),
        ("--cb-failure-threshold 7", "breaker_failures", 7),
        ("--health-check-interval-secs 4", "health_interval_s", 4.0),
        ("--sglang-router-port 30001", "port", 30001),
    ],
)
def test_sgl_routers_flags_that_mean_the_same(theirs: str, field: str, value: object) -> None:
    section = read_alone("router", theirs.split())[0].router
    assert getattr(section, f"router_{field}") == value


def test_every_flag_of_sgl_router_leads_to_one_of_ours() -> None:
    known = RouterSection.model_fields
    ours = [*RENAMED.values(), *(name for name, _ in SWITCHES.values()), *VALUES]
    own = {"host", "drain-budget-s", "log-level"}
    assert [name for name in ours if name not in own and f"router_{name.replace('-', '_')}" not in known] == []


@pytest.mark.parametrize("flag", sorted(INSTEAD))
def test_other_flags_of_sgl_router_are_refused_with_what_to_do(flag: str) -> None:
    said = refused(f"--{flag}", "1")
    assert f"--{flag}" in said and INSTEAD[flag] in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "random"], "least-in-flight"),
        (["--polciy", "x"], "Did you mean --policy?"),
        (["--lr", "3"], "--lr"),
        (["--config", "run.toml"], "service of no run"),
        (["--host", "0.0.0.0"], "--host = '0.0.0.0'"),
        (["--host", "0.0.0.0"], "Give --token-file FILE"),
        (["--log-level", "INFO"], "--log-level = 'INFO'"),
        (["--metrics-addr", "http://127.0.0.1:8660"], "--metrics-addr = 'http://127.0.0.1:8660': must be HOST:PORT"),
        (["--worker-urls", "10.0.0.5:30000"], "http://HOST:PORT"),
        (["--worker-urls", "http://u:p@h:1"], "(hidden)"),
        (["--worker-urls", "http://h:1/v1"], "base address"),
        (["--tls-cert", "x"], "must go with --tls-cert"),
        (["--policy", "session", "--session-key", "cookie:a"], "header:NAME"),
        (["--session-key", "body:user"], "no effect"),
        (["--policy", "round-robin", "--prefix-chars", "9"], "no effect"),
        (["--max-url-bytes", "9000000"], "--max-head-bytes"),
        (["--worker-allow", "10.0.0.1/8"], "network"),
        (["--port", "1", "--grpc-port", "1"], "port of HTTP"),
        (["--api-key", "secret"], "--token-file"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], said: str) -> None:
    assert said in refused(*words)


def test_files_that_cannot_be_used_are_told_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    flags = ["--token-file", "empty", "--tls-cert", "none", "--tls-key", "none", "--worker-ca", "empty"]
    done = furlong("router", "--port", "0", *flags, cwd=tmp_path)
    assert done.returncode == ExitCode.BAD_CONFIG and len(done.stderr.splitlines()) == 4, done.stderr
    assert not (tmp_path / "furlong-router").exists()


def test_off_loopback_with_a_token(tmp_path: Path, engine: str) -> None:
    (tmp_path / "token").write_text("open sesame".replace(" ", "-"))
    service = Alone(tmp_path / "kept", "--host", "0.0.0.0", "--token-file", str(tmp_path / "token"), service="router")
    try:
        port = service.http.rpartition(":")[2]
        url, body = f"http://127.0.0.1:{port}/workers", json.dumps({"url": engine}).encode()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(url, body)
        assert b"worker" in ask(url, body, authorization="Bearer open-sesame")
        status = ["status", "--run-dir", str(service.folder)]
        until(lambda: "num_ready=1" in furlong(*status).stdout, "status shows a ready worker")
    finally:
        service.end()


def test_its_lines_reach_a_metrics_service(tmp_path: Path) -> None:
    metrics = Alone(tmp_path / "metrics")
    router = Alone(tmp_path / "router", "--metrics-addr", metrics.grpc, "--name", "front", service="router")
    try:
        until(lambda: b'"front"' in ask(f"{metrics.http}/api/runs"), "the router is known")
        until(lambda: b"router_listening" in ask(f"{metrics.http}/api/logs?run=front"), "its first line")
    finally:
        router.end()
        metrics.end()
