"""Services started one by one, in any order, as a service manager does."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.launch.look import look_at
from furlong.process import ExitCode
from furlong.rundir import RunDir
from tests.system.real_runs import LIMIT_S, ROOT, Up, small_config, values

BACKWARDS = ("trainer", "rollout", "router", "metrics")


@pytest.mark.slow
def test_services_started_backwards_give_the_same_run(tmp_path: Path, whole_run: Up) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    command = [sys.executable, "-m", "furlong"]
    place = ["--config", str(small_config(tmp_path)), "--run-dir", str(run_dir.root)]
    with run_dir.config.open("wb") as resolved:
        subprocess.run([*command, "config", *place], stdout=resolved, check=True, timeout=30, cwd=ROOT)
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for service in BACKWARDS:
            quiet = (tmp_path / service).open("wb")
            started[service] = subprocess.Popen(
                [*command, service, *place], stdout=quiet, stderr=quiet, stdin=subprocess.DEVNULL, cwd=ROOT
            )
        assert started["trainer"].wait(LIMIT_S) == ExitCode.DONE
        seen = {item.instance: item.state for item in look_at(run_dir).instances}
        assert seen == {"metrics": "serving", "router": "serving", "rollout": "serving", "trainer-0": "gone"}
        for service in BACKWARDS[1:]:
            started[service].send_signal(signal.SIGTERM)
            assert started[service].wait(30) == ExitCode.DRAINED, service
    finally:
        for process in started.values():
            process.kill()
            process.wait(10)
    assert values(run_dir) == values(whole_run.run_dir)
