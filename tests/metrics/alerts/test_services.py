"""What is told of services: silence, stalls, drops, clocks, engines, sinks, starts and ends of runs."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from furlong.alertrules import BUILT_IN, Rule
from furlong.alertrules.choice import Chosen
from services.metrics.alerts.alert import Alert
from services.metrics.alerts.core import AlertCore, Now, SinkFacts
from services.metrics.alerts.rowwatch import RowFacts

WALL = 1_700_000_000.0
SINK = SinkFacts("wandb", "healthy", 0, "")


class Clock:
    """A core and a clock that is moved by hand, a tick a second."""

    def __init__(self, *more: Rule, halt_on: frozenset[str] = frozenset()) -> None:
        chosen = Chosen({**BUILT_IN, **{rule.name: rule for rule in more}}, halt_on)
        self.core, self.now = AlertCore(chosen, own_run="r"), 0.0
        self.sinks = [SINK]
        self.paused = False

    def at(self) -> Now:
        return Now(self.now, WALL + self.now)

    def say(self, event: str, *, instance: str = "trainer-0", run: str = "r", **more: Any) -> list[Alert]:
        return self.core.take_record(run, {"event": event, "instance": instance, **more}, self.at())

    def beat(self, instance: str = "trainer-0", *, skew_s: float = 0.0, **more: Any) -> list[Alert]:
        ts = datetime.fromtimestamp(WALL + self.now + skew_s, UTC).isoformat()
        return self.say("heartbeat", instance=instance, every_s=10, ts=ts, **more)

    def wait(self, seconds: float, *beating: str, **more: Any) -> list[Alert]:
        """Let time pass, in which these beat."""
        alerts = []
        for second in range(int(seconds)):
            self.now += 1.0
            if second % 10 == 0:
                for instance in beating:
                    alerts += self.beat(instance, **more)
            alerts += self.core.tick(self.at(), sinks=self.sinks, paused=self.paused)
        return alerts


def names(alerts: list[Alert]) -> list[tuple[str, str]]:
    return [(alert.rule, str(alert.state)) for alert in alerts]


def test_a_service_that_falls_silent_is_told_and_its_return_too() -> None:
    clock = Clock()
    assert clock.wait(60, "trainer-0", "rollout") == []
    gone = clock.wait(45, "trainer-0")
    assert names(gone) == [("service_gone", "firing")] and "rollout" in gone[0].summary
    assert names(clock.wait(30, "trainer-0", "rollout")) == [("service_gone", "resolved")]


def test_a_second_silent_service_is_told_too() -> None:
    clock = Clock()
    clock.wait(30, "trainer-0", "rollout", "router")
    assert names(clock.wait(50, "router", "rollout")) == [("service_gone", "firing")]
    second = clock.wait(50, "router")
    assert names(second) == [("service_gone", "firing")] and "rollout" in second[0].summary


def test_a_goodbye_and_a_run_that_ended_are_no_silence() -> None:
    clock = Clock()
    clock.wait(20, "trainer-0", "rollout")
    clock.beat("rollout", closing=True)
    assert clock.wait(100, "trainer-0") == []
    clock.say("run_ended")
    assert clock.wait(200) == []
    clock.beat("router")  # still up when it is killed, after the end
    assert clock.wait(200) == []


def test_our_own_standstill_blames_nobody() -> None:
    clock = Clock()
    clock.wait(20, "trainer-0")
    clock.now += 300.0  # stopped, and continued
    assert clock.wait(20, "trainer-0") == []
    clock.paused = True  # the disk is full: no record comes through
    assert clock.wait(200) == []


def test_a_restart_remembers_who_was_there() -> None:
    clock, again = Clock(), Clock()
    clock.wait(20, "trainer-0", "rollout")
    again.core.restore([], clock.core.services(), again.at())
    assert again.wait(30, "trainer-0") == []
    assert names(again.wait(20, "trainer-0")) == [("service_gone", "firing")]


def test_a_restart_does_not_tell_again_what_fired() -> None:
    clock, again = Clock(), Clock()
    clock.wait(20, "trainer-0", "rollout")
    fired = clock.wait(50, "trainer-0")
    again.core.restore(fired, clock.core.services(), again.at())
    assert again.wait(100, "trainer-0") == []
    assert names(again.wait(30, "trainer-0", "rollout")) == [("service_gone", "resolved")]


def test_a_phase_that_takes_six_times_its_median_is_told() -> None:
    clock = Clock()
    for _ in range(5):
        clock.say("phase", phase="training", state="open")
        assert clock.wait(10, "trainer-0") == []
        clock.say("phase", phase="training", state="closed", seconds=10.0)
    clock.say("phase", phase="training", state="open")
    assert clock.wait(59, "trainer-0") == []
    stalled = clock.wait(5, "trainer-0")
    assert names(stalled) == [("phase_stalled", "firing")] and "training" in stalled[0].summary
    clock.say("phase", phase="training", state="closed", seconds=64.0)
    assert names(clock.wait(1, "trainer-0")) == [("phase_stalled", "resolved")]


def test_a_phase_that_was_never_closed_before_has_no_usual_time() -> None:
    clock = Clock()
    clock.say("phase", phase="evaluating", state="open")
    assert clock.wait(1_000, "trainer-0") == []


def test_a_stall_outlives_a_restart_and_ends_with_its_phase() -> None:
    clock, again = Clock(), Clock()
    for _ in range(3):
        clock.say("phase", phase="training", state="closed", seconds=1.0)
    clock.say("phase", phase="training", state="open")
    stalled = clock.wait(40, "trainer-0")
    again.core.restore(stalled, clock.core.services(), again.at())
    assert again.wait(60, "trainer-0") == []
    again.say("phase", phase="training", state="closed", seconds=100.0)
    assert names(again.wait(1, "trainer-0")) == [("phase_stalled", "resolved")]


def test_short_phases_may_take_their_least_time() -> None:
    clock = Clock()
    for _ in range(5):
        clock.say("phase", phase="publishing", state="closed", seconds=0.1)
    clock.say("phase", phase="publishing", state="open")
    assert clock.wait(29, "trainer-0") == []
    assert names(clock.wait(5, "trainer-0")) == [("phase_stalled", "firing")]


def test_an_engine_is_gone_until_it_serves() -> None:
    clock = Clock(halt_on=frozenset({"engine_gone"}))
    clock.say("engine_gone", instance="rollout", engine="engine-1", exit_status=-9)
    gone = clock.wait(1, "rollout")
    assert names(gone) == [("engine_gone", "firing")] and gone[0].halt and not gone[0].diverged
    clock.say("engine_ready", instance="rollout", engine="engine-1")
    over = clock.wait(1, "rollout")
    assert names(over) == [("engine_gone", "resolved")] and not over[0].halt


def test_drops_are_told_by_word_and_by_count() -> None:
    clock = Clock()
    clock.wait(20, "trainer-0", num_dropped={"logs": 0})
    assert clock.wait(20, "trainer-0", num_dropped={"logs": 0}) == []
    assert names(clock.wait(5, "trainer-0", num_dropped={"logs": 3})) == [("queue_dropping", "firing")]
    assert names(clock.wait(80, "trainer-0", num_dropped={"logs": 3})) == [("queue_dropping", "resolved")]
    clock.say("telemetry_dropped", num_logs=2, num_warnings=0, num_metrics=1)
    told = clock.wait(1, "trainer-0", num_dropped={"logs": 3})
    assert names(told) == [("queue_dropping", "firing")] and "3 records" in told[0].summary


def test_a_clock_that_is_off_is_told_and_late_heartbeats_are_not() -> None:
    clock = Clock()
    assert names(clock.wait(40, "trainer-0", skew_s=120.0)) == [("clock_skew", "firing")]
    late = Clock()
    for _ in range(6):  # a service's spool, after an outage
        late.beat(skew_s=-100.0)
    assert late.wait(30, "trainer-0") == []


def test_a_sink_that_fails_for_a_minute_is_told_with_its_error() -> None:
    clock = Clock()
    clock.sinks = [SinkFacts("wandb", "failing", 7, "no route"), SINK]
    assert clock.wait(60, "trainer-0") == []
    failing = clock.wait(2, "trainer-0")
    assert names(failing) == [("sink_lagging", "firing")] and "no route" in failing[0].summary
    clock.sinks = [SINK]
    assert names(clock.wait(1, "trainer-0")) == [("sink_lagging", "resolved")]


def test_a_key_that_stops_coming_is_told_unless_the_run_ended() -> None:
    rule = Rule("stuck", "no_row_for", "Look.", keys=("a/x",), numbers={"seconds": 50})
    for ended in (False, True):
        clock = Clock(rule)
        clock.core.take_row(row(1, {"a/x": 1.0}), clock.at())
        if ended:
            clock.say("run_ended")
        told = names(clock.wait(60, "trainer-0"))
        assert told == ([] if ended else [("stuck", "firing")])


def row(step: int, values: Mapping[str, float], *, run: str = "r", attempt: int = 1) -> RowFacts:
    return RowFacts(run, "train/step", step, attempt, values, int(WALL * 1e6))


def test_a_new_attempt_ends_what_fires_and_may_fire_anew() -> None:
    clock = Clock(halt_on=frozenset({"loss_nonfinite"}))
    bad: dict[str, Any] = {"train/loss": float("nan")}
    first = clock.core.take_row(row(1, bad), clock.at())
    assert names(first) == [("loss_nonfinite", "firing")] and first[0].halt and first[0].attempt == 1
    over = clock.say("run_started", attempt=2)
    assert names(over) == [("loss_nonfinite", "resolved")] and not over[0].halt
    assert clock.core.take_row(row(2, bad), clock.at()) == []  # a late word of the first attempt
    second = clock.core.take_row(row(1, bad, attempt=2), clock.at())
    assert names(second) == [("loss_nonfinite", "firing")] and second[0].attempt == 2


def test_runs_are_watched_apart() -> None:
    clock = Clock()
    bad = {"train/loss": float("inf")}
    first = clock.core.take_row(row(1, bad, run="a"), clock.at())
    assert [alert.run for alert in first] == ["a"]
    assert clock.core.take_row(row(1, {"train/loss": 0.0}, run="b"), clock.at()) == []
    assert [alert.run for alert in clock.core.firing()] == ["a"]
    assert names(clock.core.take_row(row(2, bad, run="b"), clock.at())) == [("loss_nonfinite", "firing")]


def test_records_that_make_no_sense_change_nothing() -> None:
    clock = Clock()
    for record in ({}, {"event": "phase"}, {"event": "heartbeat", "instance": 3}, {"event": "run_started"}):
        assert clock.core.take_record("r", record, clock.at()) == []
    clock.say("heartbeat", every_s="x", num_dropped="y", ts="never")
    clock.say("phase", phase=None, state=7, seconds="z")
    assert clock.wait(10, "trainer-0") == []


def test_what_no_run_needs_is_forgotten() -> None:
    clock = Clock()
    for number in range(600):
        clock.core.take_row(row(1, {"train/loss": 0.0}, run=f"run-{number}"), clock.at())
    clock.core.trim({"run-3"})
    assert set(clock.core._runs) <= {"r", "run-3"}


def test_of_too_many_runs_those_heard_of_longest_ago_are_let_go() -> None:
    """Any program may name a run: what is watched of them is bounded, and nothing fires of one for ever."""
    clock = Clock()
    clock.beat("rollout", run="r")
    clock.say("heartbeat", run="old", every_s=10)
    assert ("service_gone", "firing") in names(clock.wait(60))
    for number in range(5_000):
        clock.say("heartbeat", run=f"run-{number}", every_s=10)
    over = [alert for alert in clock.wait(2, "rollout") if alert.run == "old"]
    assert names(over) == [("service_gone", "resolved")]
    assert 500 < len(clock.core.services()) < 520 and "r" in clock.core.services()
    for number in range(10_000):
        clock.say("heartbeat", instance=f"engine-{number}", every_s=10)
    assert len(clock.core.services()["r"]) < 5_000
