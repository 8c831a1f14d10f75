"""Supervision, with stub services: real processes, real signals, a real gRPC health check."""

import os
import shutil
import signal
from collections.abc import Callable

import pytest

from furlong.launch.lock import read_started
from furlong.process import ExitCode
from tests.launch.stubs import StubRun, all_gone

Start = Callable[..., StubRun]


def test_finished_trainers_end_the_run_and_metrics_drains_last(start: Start) -> None:
    run = start(trainers=["--ends-with 0 --after-s 0.3", "--ends-with 0 --after-s 0.3"])
    assert run.end() == ExitCode.DONE, run.output
    assert run.drain_order() == ["rollout", "router", "metrics"]
    assert all_gone(run.pids())


def test_metrics_is_let_start_before_it_is_stopped(start: Start) -> None:
    """When the trainer finds its work done at once, records of an earlier start may still have to be taken in."""
    run = start(trainers=["--before-serving --ends-with 0"])
    assert run.end() == ExitCode.DONE, run.output
    assert "metrics ready at" in run.output and "metrics" in run.drain_order()


def test_start_says_who_is_ready_where(start: Start) -> None:
    run = start().wait_ready()
    assert "[up] metrics ready at 127.0.0.1:" in run.output
    run.send(signal.SIGTERM)
    run.end()


def test_first_signal_drains_trainers_first_and_the_run_is_drained(start: Start) -> None:
    run = start(trainers=["--drain-s 0.3", ""]).wait_ready()
    run.send(signal.SIGINT)
    assert run.end() == ExitCode.DRAINED, run.output
    assert set(run.drain_order()[:2]) == {"trainer-0", "trainer-1"}
    assert run.drain_order()[2:] == ["rollout", "router", "metrics"]
    assert "Once more" in run.output and all_gone(run.pids())
    assert (started := read_started(run.run_dir)) and started.stopping


def test_signal_while_starting_does_not_wait_for_a_trainer_that_has_not_begun(start: Start) -> None:
    run = start(trainers=["--slow-start --deaf"], drain_s=60)
    run.wait_for(" ready at ", count=3)
    run.send(signal.SIGINT)
    assert run.end() == ExitCode.DRAINED, run.output
    assert "stopped while starting" in run.output and all_gone(run.pids())


def test_hangup_drains_too(start: Start) -> None:
    run = start().wait_ready()
    run.send(signal.SIGHUP)
    assert run.end() == ExitCode.DRAINED, run.output


def test_crash_in_a_run_directory_that_is_gone_is_still_named(start: Start) -> None:
    run = start().wait_ready()
    pids = run.pids()
    shutil.rmtree(run.run_dir.root)
    os.kill(pids["rollout"], signal.SIGKILL)
    assert run.end() == ExitCode.CRASHED, run.output
    assert "rollout was ended by SIGKILL" in run.output and all_gone(pids)


def test_signal_that_a_wrapper_passes_on_too_counts_once(start: Start) -> None:
    run = start(trainers=["--drain-s 0.5"]).wait_ready()
    run.send(signal.SIGINT)
    run.wait_for("Once more")
    run.send(signal.SIGINT)
    assert run.end() == ExitCode.DRAINED, run.output


def test_second_signal_kills_all_at_once(start: Start) -> None:
    run = start(trainers=["--drain-s 60"], rollout="--engine loose", drain_s=60).wait_ready()
    pids = run.pids()
    run.send(signal.SIGINT)
    run.wait_for("Once more")
    run.send_again(signal.SIGINT)
    assert run.end() == ExitCode.KILLED, run.output
    assert len(pids) == 5 and all_gone(pids, within_s=1)


def test_trainer_that_does_not_drain_in_time_is_killed_and_said_so(start: Start) -> None:
    run = start(trainers=["--deaf"], drain_s=0.3).wait_ready()
    run.send(signal.SIGTERM)
    assert run.end() == ExitCode.KILLED
    assert "trainer-0 did not stop within 0.3 s (--drain-budget-s)" in run.output
    assert all_gone(run.pids())


@pytest.mark.parametrize("engine", ["leashed", "loose"])
def test_crash_of_a_service_is_named_and_stops_the_rest(start: Start, engine: str) -> None:
    run = start(rollout=f"--engine {engine}").wait_ready()
    pids = run.pids()
    os.kill(pids["rollout"], signal.SIGKILL)
    assert run.end() == ExitCode.CRASHED
    assert "rollout was ended by SIGKILL" in run.output and str(run.run_dir.log("rollout").parent) in run.output
    assert len(pids) == 5 and all_gone(pids)


@pytest.mark.parametrize("code", [ExitCode.DIVERGED, ExitCode.DRAINED])
def test_trainers_exit_code_is_the_runs(start: Start, code: ExitCode) -> None:
    run = start(trainers=[f"--ends-with {int(code)} --after-s 0.2"])
    assert run.end() == code, run.output


def test_cause_is_told_from_who_only_lost_a_peer(start: Start) -> None:
    run = start(trainers=["--ends-with 5 --after-s 0.2"], rollout="--ends-with 1 --after-s 0.4").wait_ready()
    assert run.end() == ExitCode.CRASHED
    assert "rollout ended with exit code 1" in run.output and "trainer-0 ended with exit code 5" in run.output


def test_death_while_starting_shows_the_last_words(start: Start) -> None:
    run = start(rollout="--before-serving --ends-with 2")
    assert run.end() == ExitCode.BAD_CONFIG
    assert "rollout ended with exit code 2 (BAD_CONFIG) while starting" in run.output
    assert "disk is on fire" in run.output and all_gone(run.pids())


def test_a_start_that_takes_too_long_names_who_is_late(start: Start) -> None:
    run = start(trainers=["--ends-with 0 --after-s 60"], rollout="--lines 1", start_s=0.01)
    assert run.end() == ExitCode.CRASHED
    assert "not ready within 0.01 s (--start-timeout-s)" in run.output


def test_killed_supervisor_takes_everything_with_it(start: Start) -> None:
    run = start(rollout="--engine leashed", trainers=["--deaf", "--deaf"]).wait_ready()
    pids = run.pids()
    run.send(signal.SIGKILL)
    run.process.wait(10)
    assert len(pids) == 6 and all_gone(pids, within_s=5)


def test_last_line_without_newline_is_shown(start: Start) -> None:
    run = start(trainers=["--ends-with 0 --after-s 0.1"])
    run.end()
    assert "trainer-0 ends by itself" in run.output


def test_unread_stdout_does_not_stop_the_run(start: Start) -> None:
    run = start(trainers=["--lines 20000 --ends-with 0"])  # 2 MB; nobody reads until the services have ended
    pids: dict[str, int] = {}
    while len(pids) < 4:
        pids = _pids_or_none(run)
    assert all_gone(pids, within_s=20)
    run.end()
    assert "lines were not shown" in run.output
    kept = run.run_dir.log("trainer-0").with_suffix(".out").read_text()
    assert kept.count("row ") == 20000


def _pids_or_none(run: StubRun) -> dict[str, int]:
    try:
        return run.pids()
    except AssertionError:
        return {}


def test_closed_stdout_does_not_stop_the_run(start: Start) -> None:
    run = start(trainers=["--lines 20000 --ends-with 0"])
    assert run.process.stdout
    run.process.stdout.close()
    assert run.process.wait(20) == ExitCode.DONE


def test_output_of_an_earlier_start_is_kept(start: Start) -> None:
    start(trainers=["--lines 3 --ends-with 0"]).end()
    kept = start(trainers=["--lines 3 --ends-with 0"])
    kept.end()
    assert kept.run_dir.log("trainer-0").with_suffix(".out").read_text().count("row 0") == 2


def test_second_supervisor_of_a_run_directory_is_refused(start: Start) -> None:
    run = start().wait_ready()
    second = start()
    assert second.end() != 0
    run.send(signal.SIGTERM)
    assert run.end() == ExitCode.DRAINED
