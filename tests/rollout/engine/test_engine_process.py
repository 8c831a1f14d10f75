"""The process: start, refuse, drain, die with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import left_after
from tests.rollout.engine.engine_process import REPOSITORY, EngineProcess

MODULE = [sys.executable, "-m", "services.rollout.engine"]


def test_help_does_not_import_torch() -> None:
    code = "import sys; from services.rollout.engine.__main__ import main\ntry: main(['--help'])\n"
    code += "except SystemExit: pass\nassert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert b"--skip-weights" in done.stdout


def test_a_folder_without_a_model_is_refused_with_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [*MODULE, "--model-path", str(tmp_path), "--port", "0"],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["event"] == "engine_refused"
    assert "config.json" in last["error"]


def test_sigterm_lets_running_samples_end_and_exits_with_0(tmp_path: Path, checkpoint: Path) -> None:
    engine = EngineProcess(tmp_path, checkpoint, "--instance", "engine-3")
    engine.post("/slow_down", {"forward_sleep_time": 0.01})
    params = {"max_new_tokens": 60, "ignore_eos": True}
    running = engine.later("/generate", {"text": "x", "sampling_params": params})
    engine.await_running(1)
    engine.process.send_signal(signal.SIGTERM)
    assert running.result(10).json["meta_info"]["completion_tokens"] == 60
    assert engine.stop() == 0
    lines = [json.loads(line) for line in engine.log_path.read_text().splitlines() if line.startswith("{")]
    events = [line["event"] for line in lines]
    assert events == ["engine_loaded", "engine_listening", "engine_draining", "engine_stopped"]
    assert all(line["service"] == "engine" and line["instance"] == "engine-3" and line["ts"] for line in lines)
    assert lines[1]["port"] == engine.port


@pytest.mark.slow
def test_a_drain_has_a_budget_and_gives_what_there_is(tmp_path: Path, checkpoint: Path) -> None:
    engine = EngineProcess(tmp_path, checkpoint, "--drain-timeout-s", "0.2")
    engine.post("/slow_down", {"forward_sleep_time": 0.05})
    params = {"max_new_tokens": 1900, "ignore_eos": True}
    running = engine.later("/generate", {"text": "x", "sampling_params": params})
    engine.await_running(1)
    assert engine.stop() == 0
    assert running.result(1).json["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_full_queue_is_a_503(tmp_path: Path, checkpoint: Path) -> None:
    engine = EngineProcess(tmp_path, checkpoint, "--max-running-requests", "1", "--max-queued-requests", "1")
    try:
        engine.post("/pause_generation", {"mode": "in_place"})
        waiting = engine.later("/generate", {"text": ["a", "b"]})
        while engine.get("/v1/loads").json["loads"][0]["num_waiting_reqs"] < 2:
            pass
        reply = engine.post("/generate", {"text": "c"})
        assert (reply.status, reply.json["message"]) == (503, "The request queue is full.")
        engine.post("/continue_generation", {})
        assert waiting.result(10).status == 200
    finally:
        assert engine.stop() == 0


def test_an_engine_dies_with_its_parent(tmp_path: Path, checkpoint: Path) -> None:
    flags = ["--model-path", str(checkpoint), "--port", "0", "--port-file", str(tmp_path / "port")]
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen({[*MODULE, *flags]!r} + ['--parent-pid', str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 30
    while not (tmp_path / "port").exists():
        assert time.monotonic() < deadline
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    assert left_after([child], within_s=10) == []
