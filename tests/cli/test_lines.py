"""Records, rows and alerts as lines for people."""

import math
import os
import time

import pytest

from furlong.cli.lines import Style, alert_line, clean, log_line, moment, number, row_line

PLAIN = Style(colours=False)
WHEN = "2026-11-29T17:03:41.123456Z"


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TZ", "UTC")
    time.tzset()


def test_line_of_ours() -> None:
    who = {"run": "r", "service": "trainer", "instance": "trainer-0", "rank": 0}
    record = {"ts": WHEN, "level": "warning", "event": "slow", **who, "seconds": 2.123456, "why": "disk is full"}
    assert log_line(record, "", PLAIN) == "17:03:41.123 warning  trainer-0  slow seconds=2.123 why='disk is full'"


@pytest.mark.parametrize("key", ["message", "msg", "log", "text"])
def test_line_of_others(key: str) -> None:
    line = log_line({key: "hello there\n", "level": "WARN"}, WHEN, PLAIN, with_run=True)
    assert line == f"17:03:41.123 warning  {'-/-':24} hello there"


def test_tailed_line_is_its_text() -> None:
    record = {"event": "line", "service": "engine", "instance": "engine-0", "file": "x.out", "text": "Decode batch"}
    assert log_line(record, WHEN, PLAIN) == "17:03:41.123 info     engine-0   Decode batch file=x.out"


def test_traceback_is_told_by_its_last_line() -> None:
    line = log_line({"event": "boom", "exception": "Traceback\n  File x\nValueError: no"}, WHEN, PLAIN)
    assert line.endswith("boom exception='ValueError: no'")


@pytest.mark.parametrize("evil", ["\x1b[2J", "a\nb", "\r", "\x07", "\x9b31m", "\u202e"])
def test_nothing_of_others_is_obeyed_by_the_terminal(evil: str) -> None:
    record = {"event": f"e{evil}", "instance": evil, f"k{evil}": evil, "message": evil, "run": evil}
    for line in (log_line(record, WHEN, PLAIN, with_run=True), row_line({"run": evil, "values": {evil: evil}}, PLAIN)):
        assert line.isprintable()
    assert evil not in clean(evil)


def test_row_shows_the_known_keys_first_and_counts_the_rest() -> None:
    values = {**{f"a/{n}": n for n in range(20)}, "train/loss": 0.123456, "bad": "NaN"}
    row = {
        "axis": "train/step",
        "step": 7,
        "attempt": 2,
        "complete": False,
        "amends": True,
        "emitted": WHEN,
        "values": values,
    }
    line = row_line(row, PLAIN)
    assert line.startswith(
        "17:03:41.123 row      train/step 7 (incomplete, amended, attempt 2) train/loss=0.1235 a/0=0"
    )
    assert line.endswith("and 16 more")
    named = row_line({**row, "histograms": dict.fromkeys(["b/h", "a/h"]), "tables": dict.fromkeys("tuvw")}, PLAIN)
    assert named == f"{line} histograms: a/h, b/h tables: t, u, v and 1 more"


def test_alert_says_what_and_what_to_do() -> None:
    alert = {"rule": "loss_spike", "state": "firing", "severity": "critical", "at_us": 1796144621123456,
             "summary": "train/loss is 9.1", "remedy": "Lower --lr."}  # fmt: skip
    assert alert_line(alert, PLAIN).endswith("FIRING   loss_spike: train/loss is 9.1. Lower --lr.")
    at_a_step = alert_line({**alert, "axis": "train/step", "step": 40}, PLAIN)
    assert "loss_spike: train/step 40: train/loss is 9.1. Lower" in at_a_step
    assert "Lower" not in alert_line({**alert, "state": "resolved"}, PLAIN)


@pytest.mark.parametrize(
    "when", [1796144621.5, 1796144621500, 1796144621500000, 1796144621500000000, "2026-12-01T17:43:41.5+01:00"]
)
@pytest.mark.parametrize("key", ["ts", "timestamp", "@timestamp", "time", "date"])
def test_moments_in_any_spelling(key: str, when: object) -> None:
    expected = 1796143421.5 if isinstance(when, str) else 1796144621.5
    assert moment({key: when}, WHEN) == pytest.approx(expected)


@pytest.mark.parametrize("when", [None, "yesterday", True, -5, float("nan"), [], 1e300])
def test_moment_that_is_none_is_when_it_came(when: object) -> None:
    assert moment({"ts": when}, "1970-01-01T00:00:05Z") == 5.0


@pytest.mark.parametrize(
    ("value", "shown"),
    [(16_777_217.0, "16777217"), (2**60 + 1, str(2**60 + 1)), (1234567.8, "1.235e+06"), (1e-6, "1e-06"), (-0.0, "0"),
     (math.inf, "inf"), ("NaN", "NaN"), (1e300, "1e+300")],
)  # fmt: skip
def test_whole_numbers_are_shown_whole(value: object, shown: str) -> None:
    assert number(value) == shown
