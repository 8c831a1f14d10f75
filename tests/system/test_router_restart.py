"""The router of a real run is killed or stopped in the middle: it comes back, and the run's numbers are the same."""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from furlong import addresses
from furlong.launch.lock import read_started
from furlong.process import ExitCode
from tests.system.conftest import Start
from tests.system.real_runs import LIMIT_S, Up, final_weights, values

READY, AGAIN = "router ready at", "Rollout waits for it"


def until(up: Up, condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert up.process.poll() is None, f"it ended before: {what}\n{up.told()}"
        assert time.monotonic() < deadline, f"{what}\n{up.told()}"
        time.sleep(0.01)


def end_router(up: Up, number: signal.Signals) -> None:
    """End the router that runs now, and wait until the next one serves."""
    up.look()
    started, num_ready = read_started(up.run_dir), up.stdout.count(READY)
    assert started is not None
    os.kill(started.children["router"].pid, number)
    until(up, lambda: up.stdout.count(READY) > num_ready, "the router serves again")


def same_as(whole_run: Up, up: Up) -> None:
    assert up.end() == ExitCode.DONE, up.told()
    assert values(up.run_dir) == values(whole_run.run_dir)
    assert final_weights(up.run_dir) == final_weights(whole_run.run_dir)
    assert up.left_running(within_s=2) == []


def test_a_router_that_is_killed_in_the_middle_changes_no_number(start: Start, whole_run: Up) -> None:
    up = start().wait_for("iter 1/4")
    end_router(up, signal.SIGKILL)
    same_as(whole_run, up)
    assert "router was ended by SIGKILL" in up.stdout and up.stdout.count(AGAIN) == 1


@pytest.mark.slow
def test_a_router_that_goes_again_and_again_changes_no_number(start: Start, whole_run: Up) -> None:
    up = start().wait_for("rollout ready at")
    end_router(up, signal.SIGKILL)
    end_router(up.wait_for("iter 1/4"), signal.SIGTERM)
    end_router(up, signal.SIGKILL)
    same_as(whole_run, up)
    assert up.stdout.count(AGAIN) == 3


@pytest.mark.slow
def test_a_router_with_a_token_serves_its_run_and_nobody_else(start: Start, whole_run: Up, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("open-sesame\n")
    up = start("--router-token-file", str(token)).wait_for("iter 1/4")
    entry = addresses.find(up.run_dir, "router")
    assert entry is not None
    request = urllib.request.Request(f"{entry.http}/workers")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=10)
    request.add_header("authorization", "Bearer open-sesame")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert b'"engine-0"' in answer.read()
    end_router(up, signal.SIGKILL)
    same_as(whole_run, up)
    assert not any("open-sesame" in path.read_text() for path in up.run_dir.log("x").parent.iterdir())


@pytest.mark.slow
def test_a_router_of_two_processes_comes_back_at_its_port(start: Start, whole_run: Up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    up = start("--router-processes", "2", "--router-port", str(port)).wait_for("iter 1/4")
    end_router(up, signal.SIGKILL)
    same_as(whole_run, up)
    assert up.stdout.count(f"http://127.0.0.1:{port}") == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_run_over_https(start: Start, whole_run: Up, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=somewhere.example"]
    subprocess.run([*make, "-keyout", str(key), "-out", str(cert)], check=True, timeout=30, capture_output=True)
    up = start("--router-tls-cert", str(cert), "--router-tls-key", str(key))
    same_as(whole_run, up)
    assert "https://127.0.0.1:" in up.stdout
