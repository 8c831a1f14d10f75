"""Alerts at the trainer: what a person reads, what a program reads, and what halts the run."""

import dataclasses
import json
import os

import pytest

from furlong.alertwatch import HeardAlert
from furlong.process import ExitCode, StopSignal
from services.trainer.alert_lines import AlertLines, json_line, text_lines
from services.trainer.row_writer import RowWriter

ALERT = HeardAlert(
    alert_id=4,
    run="r",
    rule="loss_spike",
    firing=True,
    severity="critical",
    axis="train/step",
    step=42,
    attempt=1,
    summary="train/loss is 3.1, far from its usual -0.02 to 0.03",
    remedy="Lower --lr.",
    evidence='{"values":[0.1,3.1]}',
    at_us=7,
    halt=False,
    diverged=True,
)
OVER = dataclasses.replace(ALERT, firing=False, summary="over after 5 good rows")


def test_a_person_reads_what_where_and_what_to_do() -> None:
    assert text_lines(ALERT, halts=True) == (
        "[alert] CRITICAL loss_spike | train/step 42: train/loss is 3.1, far from its usual -0.02 to 0.03\n"
        "                            | Lower --lr.\n"
        "                            | the run stops for it (--halt-on loss_spike)"
    )
    assert text_lines(OVER, halts=False) == "[alert] resolved loss_spike | train/step 42: over after 5 good rows"


def test_an_alert_of_no_axis_names_no_step() -> None:
    gone = dataclasses.replace(ALERT, axis="", severity="warning", rule="clock_skew", summary="a\n b")
    assert text_lines(gone, halts=False).splitlines()[0] == "[alert] warning clock_skew | a b"
    assert json.loads(json_line(gone, halts=False))["step"] is None


def test_a_program_reads_one_object_a_line() -> None:
    line = json_line(ALERT, halts=False)
    tree = json.loads(line)
    assert "\n" not in line and tree["event"] == "alert" and tree["evidence"] == {"values": [0.1, 3.1]}
    assert (tree["rule"], tree["state"], tree["step"], tree["halts"]) == ("loss_spike", "firing", 42, False)


def taken(*alerts: HeardAlert, halt_on: frozenset[str] = frozenset(), as_json: bool = False) -> tuple[StopSignal, str]:
    """What is asked of the run, and what stands on stdout."""
    reader, writer = os.pipe()
    stop, rows = StopSignal(), RowWriter(writer)
    lines = AlertLines(rows, stop, halt_on=halt_on, as_json=as_json)
    for alert in alerts:
        lines.take(alert)
    rows.close(5.0)
    os.close(writer)
    with os.fdopen(reader) as file:
        return stop, file.read()


def test_an_alert_that_nobody_named_stops_nothing() -> None:
    stop, shown = taken(ALERT, OVER, halt_on=frozenset({"kl_jump"}))
    assert not stop.requested.is_set() and shown.count("[alert]") == 2


@pytest.mark.parametrize(("diverged", "code"), [(True, ExitCode.DIVERGED), (False, ExitCode.HALTED)])
def test_a_named_alert_stops_the_run_with_a_truthful_code(diverged: bool, code: ExitCode) -> None:
    alert = dataclasses.replace(ALERT, diverged=diverged)
    stop, shown = taken(alert, halt_on=frozenset({"loss_spike"}))
    assert stop.requested.is_set() and stop.code is code
    assert "the run stops for it" in shown and "loss_spike" in stop.reason


def test_the_metrics_service_may_ask_for_the_stop_itself() -> None:
    assert taken(dataclasses.replace(ALERT, halt=True))[0].requested.is_set()
    assert not taken(dataclasses.replace(OVER, halt=True))[0].requested.is_set()


def test_with_log_format_json_every_line_is_an_object() -> None:
    _, shown = taken(ALERT, OVER, as_json=True)
    assert [json.loads(line)["state"] for line in shown.splitlines()] == ["firing", "resolved"]


@pytest.mark.parametrize("as_json", [False, True])
def test_rules_that_nobody_watches_are_told_with_a_remedy_and_halt_nothing(as_json: bool) -> None:
    reader, writer = os.pipe()
    stop, rows = StopSignal(), RowWriter(writer)
    AlertLines(rows, stop, halt_on=frozenset(["mine"]), as_json=as_json).take_unwatched("127.0.0.1:9", ["mine"])
    rows.close(5.0)
    text = os.read(reader, 65536).decode()
    assert "127.0.0.1:9 does not watch mine: --halt-on mine will not stop the run" in text and "--alert-rules" in text
    assert not stop.requested.is_set()
    assert (json.loads(text)["rules"] == ["mine"]) if as_json else text.startswith("[alert] warning halt_on |")
