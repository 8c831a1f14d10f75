"""The metrics service or the router dies, hangs or cannot start: it is started again, and the run goes on."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from furlong.launch import keeper
from furlong.launch.keeper import MAX_DEATHS, Keeper
from furlong.launch.lock import read_started
from furlong.process import ExitCode
from tests.launch.stubs import LIMIT_S, StubRun, all_gone

Start = Callable[..., StubRun]
BUSY = "--ends-with 0 --after-s 60"


class Dead:
    """Stands for a child that has ended."""

    plan = type("Plan", (), {"instance": "metrics"})
    output_path = Path("metrics.out")

    def __init__(self, code: int) -> None:
        self.code = code

    def exit_code(self) -> int:
        return self.code

    def describe_end(self) -> str:
        return f"ended with exit code {self.code}"

    def last_lines(self, count: int) -> list[str]:
        return ["out of luck"]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def keep(
    *deaths: int, others_start: bool = False, serves_before: int | None = None, without: str = "Never mind."
) -> tuple[Keeper, list[str], int]:
    """A keeper after deaths by exit code; what it said; how often it started. serves_before: index of a death."""
    said: list[str] = []
    started: list[str] = []
    kept = Keeper(
        start_again=lambda child, why: started.append(why), say=said.append, meanwhile="Wait", without=without
    )
    for number, code in enumerate(deaths):
        if number == serves_before:
            kept.serves()
        child: Any = Dead(code)  # Any: only what the keeper asks of a child
        kept.look(child, others_start=others_start)
        kept.look(child, others_start=others_start, at_once=True)
    return kept, said, len(started)


def test_five_deaths_in_a_row_are_enough_and_it_is_said() -> None:
    kept, said, num_started = keep(*[1] * (MAX_DEATHS + 2))
    assert num_started == MAX_DEATHS - 1 and "5 times in a row" in kept.given_up and not kept.ends_run
    assert "is not started again. Never mind." in said[-1] and "out of luck" in said[-1]


def test_a_death_after_serving_begins_the_count_anew() -> None:
    kept, _, num_started = keep(*[1] * (MAX_DEATHS + 2), serves_before=MAX_DEATHS - 1)
    assert not kept.given_up and num_started == MAX_DEATHS + 2


def test_bad_configuration_is_not_tried_again_and_refuses_a_start() -> None:
    assert keep(ExitCode.BAD_CONFIG)[0].given_up and not keep(ExitCode.BAD_CONFIG)[0].refused_start
    kept, said, _ = keep(ExitCode.BAD_CONFIG, others_start=True)
    assert kept.refused_start and not said
    assert not keep(ExitCode.BAD_CONFIG, others_start=True, serves_before=0)[0].refused_start


def test_the_run_ends_for_one_that_it_cannot_do_without() -> None:
    kept, said, num_started = keep(*[1] * MAX_DEATHS, without="")
    assert kept.ends_run and num_started == MAX_DEATHS - 1 and "not started again" not in " ".join(said)


def test_a_service_that_is_needed_and_cannot_be_started_ends_the_run() -> None:
    def refuse(child: object, why: str) -> None:
        raise OSError("no room")

    said: list[str] = []
    kept, dead = Keeper(start_again=refuse, say=said.append, meanwhile="Wait"), Dead(-9)
    kept.serves()
    for _ in range(MAX_DEATHS + 1):
        kept.look(dead, others_start=False, at_once=True)  # pyrefly: ignore
    assert kept.ends_run and "no room" in kept.given_up


def test_waits_grow_up_to_ten_seconds() -> None:
    said = " ".join(keep(*[-9] * 8, serves_before=0)[1][:4])
    assert [f"again in {seconds} s" in said for seconds in ("0.5", "1", "2", "4")] == [True] * 4
    assert keeper.MAX_WAIT_S == 10.0


def test_killed_metrics_is_started_again_and_drains_last(start: Start) -> None:
    run = start(trainers=["--ends-with 0 --after-s 6"]).wait_ready()
    first = run.pids()["metrics"]
    os.kill(first, signal.SIGKILL)
    run.wait_for("metrics ready at", count=2)
    assert run.pids()["metrics"] != first
    assert run.end() == ExitCode.DONE, run.output
    assert "metrics was ended by SIGKILL" in run.output and "starting it again in 0.5 s" in run.output
    assert run.drain_order() == ["rollout", "router", "metrics"] and all_gone(run.pids())


def test_killed_router_is_started_again(start: Start) -> None:
    run = start(trainers=["--ends-with 0 --after-s 6"]).wait_ready()
    first = run.pids()["router"]
    os.kill(first, signal.SIGKILL)
    run.wait_for("router ready at", count=2)
    assert run.pids()["router"] != first
    assert run.end() == ExitCode.DONE, run.output
    assert "router was ended by SIGKILL" in run.output and "in 0.5 s. Rollout waits for it" in run.output
    assert run.drain_order() == ["rollout", "router", "metrics"] and all_gone(run.pids())


def test_router_that_refuses_to_go_on_ends_the_run(start: Start) -> None:
    run = start(router="--ends-with 2 --after-s 1.5", trainers=[BUSY])
    assert run.end() == ExitCode.CRASHED, run.output
    assert "router ended with exit code 2 (BAD_CONFIG)" in run.output and "router.out" in run.output
    assert run.output.count("router ready at") == 1 and all_gone(run.pids())


@pytest.mark.slow
def test_router_that_never_serves_ends_the_run_and_its_deaths_are_counted(start: Start) -> None:
    run = start(router="--ends-with 1 --before-serving", trainers=[BUSY])
    assert run.end() == ExitCode.CRASHED, run.output
    assert f"{MAX_DEATHS} times in a row while starting" in run.output
    assert all_gone(run.pids())


def test_router_that_dies_while_rollout_drains_is_started_again_for_it(start: Start) -> None:
    run = start(rollout="--drain-s 3", trainers=["--ends-with 0 --after-s 1.5"]).wait_ready()
    until((run.run_dir.root / "rollout.draining").exists, "rollout drains")
    os.kill(run.pids()["router"], signal.SIGKILL)
    assert run.end() == ExitCode.DONE, run.output
    assert run.output.count("router ready at") == 2 and all_gone(run.pids())


def test_metrics_killed_while_it_drains_is_started_again_for_it(start: Start) -> None:
    run = start(metrics="--drain-s 3", trainers=["--ends-with 0 --after-s 1.5"]).wait_ready()
    until((run.run_dir.root / "metrics.draining").exists, "metrics drains")
    os.kill(run.pids()["metrics"], signal.SIGKILL)
    assert run.end() == ExitCode.DONE, run.output
    assert "starting it again now" in run.output
    assert run.drain_order() == ["rollout", "router", "metrics"] and all_gone(run.pids())


def test_metrics_that_refuses_to_go_on_is_left_and_the_run_is_done(start: Start) -> None:
    run = start(metrics="--ends-with 2 --after-s 1.5", trainers=["--ends-with 0 --after-s 6"])
    assert run.end() == ExitCode.DONE, run.output
    assert "metrics ended with exit code 2 (BAD_CONFIG) and is not started again" in run.output
    assert run.output.count("metrics ready at") == 1 and all_gone(run.pids())


def test_metrics_that_cannot_start_at_the_beginning_is_refused(start: Start) -> None:
    run = start(metrics="--before-serving --ends-with 2", trainers=["--slow-start"])
    assert run.end() == ExitCode.BAD_CONFIG, run.output
    assert "metrics ended with exit code 2 (BAD_CONFIG) while starting" in run.output and "on fire" in run.output
    assert all_gone(run.pids())


def test_suspended_metrics_is_left_alone_until_the_end(start: Start) -> None:
    run = start(trainers=["--ends-with 0 --after-s 2"]).wait_ready()
    first = run.pids()["metrics"]
    os.kill(first, signal.SIGSTOP)
    assert run.end() == ExitCode.DONE, run.output
    assert run.output.count("metrics ready at") == 2 and "metrics" in run.drain_order()
    assert all_gone({**run.pids(), "first": first})


def test_crash_while_metrics_is_away_is_told_and_leaves_nothing(start: Start) -> None:
    run = start(trainers=[BUSY]).wait_ready()
    pids = run.pids()
    os.kill(pids["metrics"], signal.SIGKILL)
    os.kill(pids["rollout"], signal.SIGKILL)
    assert run.end() == ExitCode.CRASHED
    assert "rollout was ended by SIGKILL" in run.output and all_gone({**pids, **run.pids()})


def test_stops_are_heard_while_metrics_is_away(start: Start) -> None:
    run = start(trainers=["--drain-s 60"], drain_s=60).wait_ready()
    os.kill(run.pids()["metrics"], signal.SIGKILL)
    run.wait_for("starting it again")
    run.send(signal.SIGINT)
    run.wait_for("Once more")
    run.send_again(signal.SIGINT)
    assert run.end() == ExitCode.KILLED, run.output
    assert all_gone(run.pids(), within_s=1)


def test_killed_supervisor_takes_a_restarted_metrics_with_it(start: Start) -> None:
    run = start(trainers=[BUSY]).wait_ready()
    os.kill(run.pids()["metrics"], signal.SIGKILL)
    run.wait_for("metrics ready at", count=2)
    pids = run.pids()
    assert read_started(run.run_dir)
    run.send(signal.SIGKILL)
    run.process.wait(10)
    assert all_gone(pids, within_s=5)


@pytest.mark.slow
def test_metrics_that_never_serves_does_not_end_the_start(start: Start) -> None:
    run = start(metrics="--slow-start", trainers=["--ends-with 0 --after-s 12"], start_s=10)
    assert run.end() == ExitCode.DONE, run.output
    assert "metrics is not ready within 10 s (--start-timeout-s). Training goes on" in run.output
