"""The frame around every service: a real process, its exit code, its address, its drain."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from furlong.addresses import find, read_addresses
from furlong.process import ExitCode
from furlong.rundir import RunDir

LIMIT_S = 30.0

PROGRAM = textwrap.dedent("""
    import asyncio, contextlib, sys
    from furlong import addresses
    from furlong.addresses import NotReachable
    from furlong.config import ConfigError, RunConfig
    from furlong.config.errors import Problem
    from furlong.addresses import PortTaken
    from furlong.service import run_async

    mode, folder = sys.argv[1:]

    async def fail_later():
        await asyncio.sleep(0.05)
        raise RuntimeError("background trouble")

    @contextlib.asynccontextmanager
    async def serve(context):
        if mode == "port":
            raise PortTaken("cannot listen on 127.0.0.1:7")
        if mode == "config":
            raise ConfigError([Problem("a.b", 1, "must be 2")])
        if mode == "peer":
            raise NotReachable("router did not appear")
        if mode == "crash":
            raise ValueError("a bug")
        if mode == "start":
            print("starting", flush=True)
            await asyncio.sleep(60)
        if mode == "task":
            context.watch(asyncio.create_task(fail_later(), name="worker"))
        addresses.publish(context.run_dir, context.instance, grpc="127.0.0.1:1")
        print("ready", type(asyncio.get_running_loop()).__module__, flush=True)
        yield
        print("draining", flush=True)
        if mode == "stuck":
            await asyncio.sleep(60)
        if mode == "bad-drain":
            raise ValueError("a bug at the end")
        print("drained", flush=True)

    loop_factory = None
    if mode == "uvloop":
        import uvloop
        loop_factory = uvloop.new_event_loop
    config = RunConfig.model_validate({"run": {"run_dir": folder, "drain_budget_s": 1.0}})
    sys.exit(run_async(config, service="router", foreground=False, serve=serve, loop_factory=loop_factory))
""")


def run(mode: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, mode, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("mode", "loop"), [("plain", "asyncio.unix_events"), ("uvloop", "uvloop")])
def test_it_serves_drains_and_withdraws_its_address(tmp_path: Path, mode: str, loop: str) -> None:
    process = run(mode, tmp_path)
    assert line(process) == f"ready {loop}"
    assert find(RunDir(tmp_path), "router") is not None
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert out.split() == ["draining", "drained"] and process.returncode == ExitCode.DRAINED
    assert read_addresses(RunDir(tmp_path)) == {}


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("port", ExitCode.BAD_CONFIG, "cannot listen on 127.0.0.1:7"),
        ("config", ExitCode.BAD_CONFIG, "a.b = 1: must be 2"),
        ("peer", ExitCode.PEER_LOST, "router did not appear"),
        ("crash", ExitCode.CRASHED, "ValueError: a bug"),
    ],
)
def test_a_failed_start_says_why_in_code_stderr_and_log(tmp_path: Path, mode: str, code: ExitCode, said: str) -> None:
    process = run(mode, tmp_path)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code and said in err
    assert said.split(": ")[-1] in RunDir(tmp_path).log("router").read_text()


def test_a_stop_during_the_start_ends_it(tmp_path: Path) -> None:
    process = run("start", tmp_path)
    assert line(process) == "starting"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == ExitCode.DRAINED


def test_a_failed_background_task_ends_the_service_with_its_error_logged(tmp_path: Path) -> None:
    process = run("task", tmp_path)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == ExitCode.CRASHED and "drained" in out
    text = RunDir(tmp_path).log("router").read_text()
    assert "task_failed" in text and "background trouble" in text


def test_a_drain_is_cut_short_at_its_budget(tmp_path: Path) -> None:
    process = run("stuck", tmp_path)
    assert line(process).startswith("ready")
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - started < 10 and process.returncode == ExitCode.DRAINED
    assert "service_cut_short" in RunDir(tmp_path).log("router").read_text()


def test_an_error_in_the_drain_is_a_crash(tmp_path: Path) -> None:
    process = run("bad-drain", tmp_path)
    assert line(process).startswith("ready")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == ExitCode.CRASHED and "a bug at the end" in err


def test_a_second_signal_ends_a_drain(tmp_path: Path) -> None:
    process = run("stuck", tmp_path)
    assert line(process).startswith("ready")
    process.send_signal(signal.SIGTERM)
    assert line(process) == "draining"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == ExitCode.KILLED
