"""Runs that are stopped or killed, and go on: numbers and weights as in an unbroken run, and nothing left over."""

import os
import signal

import pytest

from furlong.launch.checkpoints import newest_checkpoint
from furlong.launch.lock import read_started
from furlong.process import ExitCode
from tests.system.conftest import Start
from tests.system.real_runs import Up, final_weights, values


def finish_like(whole_run: Up, up: Up) -> None:
    """It ends well, with the rows and weights of the unbroken run."""
    assert up.end() == ExitCode.DONE, up.told()
    assert final_weights(up.run_dir) == final_weights(whole_run.run_dir)
    assert values(up.run_dir) == values(whole_run.run_dir)


def test_one_ctrl_c_saves_and_the_same_command_goes_on(start: Start, whole_run: Up) -> None:
    up = start().wait_for("iter 2/4").send(signal.SIGINT)
    assert up.end() == ExitCode.DRAINED, up.told()
    assert up.left_running(within_s=2) == []
    checkpoint = newest_checkpoint(up.run_dir)
    assert checkpoint is not None and f"rollout_{checkpoint.rollout_id:06d}" in up.stdout
    again = start()
    again.wait_for(f"after rollout {checkpoint.rollout_id}")
    finish_like(whole_run, again)


def test_two_ctrl_c_end_everything_at_once(start: Start) -> None:
    up = start().wait_for("iter 1/4").send(signal.SIGINT).wait_for("Once more").send_again(signal.SIGINT)
    assert up.end(limit_s=5) == ExitCode.KILLED, up.told()
    assert up.left_running(within_s=1) == []


def test_killed_up_takes_all_with_it_and_the_next_goes_on(start: Start, whole_run: Up) -> None:
    up = start().wait_for("iter 2/4").send(signal.SIGKILL)
    up.end()
    assert len(up.seen) >= 5 and up.left_running(within_s=10) == []
    finish_like(whole_run, start())


@pytest.mark.slow
@pytest.mark.parametrize("instance", ["rollout", "trainer-0"])
def test_killed_service_ends_the_run_and_the_next_goes_on(start: Start, whole_run: Up, instance: str) -> None:
    up = start().wait_for("iter 1/4")
    started = read_started(up.run_dir)
    assert started
    os.kill(started.children[instance].pid, signal.SIGKILL)
    assert up.end() == ExitCode.CRASHED, up.told()
    assert f"{instance} was ended by SIGKILL" in up.stderr
    assert up.left_running(within_s=2) == []
    finish_like(whole_run, start())


def test_ctrl_c_while_starting_stops_soon(start: Start) -> None:
    up = start().wait_for("[up] started").send(signal.SIGINT)
    assert up.end(limit_s=30) == ExitCode.DRAINED, up.told()
    assert "stopped while starting" in up.stdout and up.left_running(within_s=1) == []


def test_second_up_of_a_run_is_refused_naming_the_first(start: Start, whole_run: Up) -> None:
    first = start().wait_for("metrics ready at")
    second = start()
    assert second.end(limit_s=20) == ExitCode.BAD_CONFIG
    assert f"pid {first.process.pid}" in second.stderr and "Traceback" not in second.stderr
