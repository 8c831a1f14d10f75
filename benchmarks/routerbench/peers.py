"""Who is measured: the worker itself, nginx, the other routers for SGLang, and ours. How each is started."""

import contextlib
import json
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.routerbench.running import Cpus, running, until
from tests import tools

START_LIMIT_S = 30.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
OURS = "furlong"
OURS_2 = "furlong x2"
SGLANG = "sglang-router"
DIRECT = "direct"
QUIET = ("--log-level", "error", "--prometheus-host", "127.0.0.1", "--prometheus-port")


@dataclass(frozen=True)
class Routed:
    """A router that answers, or a worker in its place."""

    name: str
    url: str
    pid: int | None
    """None: there is no router."""
    workers: tuple[str, ...]
    start_s: float


@dataclass(frozen=True)
class Peer:
    """One that can be measured."""

    name: str
    command: Callable[[int, Sequence[str], Path], Sequence[str]] | None
    """From port, worker urls and a folder. None: the worker itself."""
    missing: str = ""
    """Why it cannot be."""
    both_cpus: bool = False


def peers() -> list[Peer]:
    """All of them; those that are not here say why."""
    found = [Peer(DIRECT, None)]
    for name, command in (("nginx", _nginx), (SGLANG, _sglang_router), ("smg", _smg)):
        missing = "" if tools.find(name) else tools.why_missing(name)
        found.append(Peer(name, command, missing))
    return [*found, Peer(OURS, _ours), Peer(OURS_2, _ours_twice, both_cpus=True)]


@contextlib.contextmanager
def workers(
    num: int, cpus: frozenset[int], folder: Path, *, by: signal.Signals = signal.SIGTERM
) -> Generator[list[str]]:
    """Urls of fake workers. by: what ends them."""
    tool = tools.find("fakeworker")
    command = tool.command if tool else (sys.executable, "-m", "benchmarks.routerbench.pyworker")
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(num):
            process = stack.enter_context(running(command, cpus=cpus, log=folder / "worker.log", by=by))
            assert process.stdout
            urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}")
        yield urls


@contextlib.contextmanager
def routed(peer: Peer, urls: Sequence[str], cpus: Cpus, folder: Path) -> Generator[Routed]:
    """A peer that has just answered its first request."""
    if peer.command is None:
        yield Routed(peer.name, urls[0], None, tuple(urls), 0.0)
        return
    port, started = tools.free_port(), time.monotonic()
    tool = tools.find(peer.name) if peer.name in ("nginx", SGLANG, "smg") else None
    log = folder / f"{peer.name.replace(' ', '-')}.log"
    where = cpus.router | cpus.load if peer.both_cpus else cpus.router
    environment = {**(tool.environment if tool else {}), "HF_ENDPOINT": "http://127.0.0.1:1"}
    with running(peer.command(port, urls, folder), cpus=where, log=log, environment=environment) as process:
        deadline = started + START_LIMIT_S
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            if process.poll() is not None or not until(deadline):
                said = log.read_text(errors="replace")[-600:]
                raise RuntimeError(f"{peer.name} gave no answer within {START_LIMIT_S:g} s: {said}")
        yield Routed(peer.name, url, process.pid, tuple(urls), time.monotonic() - started)


def answers(url: str) -> bool:
    """Whether a generation comes back."""
    try:
        fetch(f"{url}/generate", {"text": "first"}, timeout_s=2.0)
    except OSError:
        return False
    return True


def fetch(url: str, content: object = None, *, timeout_s: float = 10.0) -> bytes:
    """GET, or POST of JSON. Raises OSError, HTTPError among them."""
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with OPENER.open(request, timeout=timeout_s) as answer:
        return answer.read()


def stats(worker: str) -> dict[str, int]:
    """What a worker counted."""
    return json.loads(fetch(f"{worker}/stats"))


def _ours(port: int, urls: Sequence[str], folder: Path) -> list[str]:
    command = [str(Path(sys.executable).with_name("furlong")), "router", "--port", str(port)]
    workers = ["--worker-urls", *urls] if urls else []
    return [*command, "--dir", str(folder / f"furlong-{port}"), "--drain-budget-s", "1", *workers]


def _ours_twice(port: int, urls: Sequence[str], folder: Path) -> list[str]:
    return [*_ours(port, urls, folder), "--processes", "2"]


def _sglang_router(port: int, urls: Sequence[str], folder: Path) -> list[str]:
    """Without its breaker, which after a few broken answers refuses everything else that is asked of it."""
    return [*_found("sglang-router"), "launch", *_rust(port, urls), "--disable-circuit-breaker"]


def _smg(port: int, urls: Sequence[str], folder: Path) -> list[str]:
    return [*_found("smg"), "launch", *_rust(port, urls), "--disable-tokenizer-autoload"]


def _rust(port: int, urls: Sequence[str]) -> list[str]:
    workers = ["--worker-urls", *urls] if urls else []
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [*where, *workers, "--policy", "round_robin", *QUIET, str(tools.free_port())]


def _found(name: str) -> tuple[str, ...]:
    tool = tools.find(name)
    assert tool, name
    return tool.command


def _nginx(port: int, urls: Sequence[str], folder: Path) -> list[str]:
    hosts = [url.removeprefix("http://") for url in urls]
    servers = " ".join(f"server {host} max_fails=0;" for host in hosts)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/nginx-{kind};" for kind in kinds)
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; worker_rlimit_nofile 40000; pid {folder}/nginx.pid; user root;\n"
        "events { worker_connections 32768; }\n"
        f"http {{ access_log off; {temporary} keepalive_requests 10000000; client_max_body_size 0;\n"
        f"upstream all {{ least_conn; {servers} keepalive 4096; keepalive_requests 10000000; }}\n"
        f"server {{ listen 127.0.0.1:{port} backlog=8192; location / {{ proxy_pass http://all;\n"
        'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host;\n'
        "proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 600s; } } }\n"
    )
    return [*_found("nginx"), "-p", str(folder), "-c", str(config), "-e", str(folder / "nginx.err")]
