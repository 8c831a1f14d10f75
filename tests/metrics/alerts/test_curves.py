"""Steps that repeat, go back or come late, and attempts; rules of one's own; when rules fire and cease."""

import math
from collections.abc import Iterable

from furlong.alertrules import Rule
from services.metrics.alerts.alert import Alert, State
from services.metrics.alerts.hysteresis import Hysteresis
from services.metrics.alerts.rowwatch import RowFacts
from services.metrics.alerts.runwatch import RunWatch, facts_of, fits
from services.metrics.alerts.window import Window


def row(step: int, value: float | None, *, attempt: int = 1, key: str = "a/x", axis: str = "train/step") -> RowFacts:
    return RowFacts("r", axis, step, attempt, {} if value is None else {key: value}, 0)


def told(rule: Rule, rows: Iterable[RowFacts]) -> list[tuple[int, str]]:
    watch = RunWatch([rule], halt_on=frozenset())
    return [(alert.step, str(alert.state)) for one in rows for alert in watch.take(one)]


def above(limit: float = 1.0, **more: object) -> Rule:
    return Rule("x", "above", "Do.", keys=("a/x",), numbers={"limit": limit}, **more)  # type: ignore[arg-type]


def test_it_fires_after_k_bad_rows_and_is_over_after_m_good_ones() -> None:
    values = [2, 2, 0, 2, 2, 2, 0, 2, 0, 0, 0]
    assert told(above(rows=3, resolve_rows=2), [row(step, v) for step, v in enumerate(values)]) == [
        (5, "firing"),
        (9, "resolved"),
    ]


def test_it_is_quiet_for_a_while_after_its_end() -> None:
    values = [2, 0, 2, 2, 2, 2, 2]
    found = told(above(resolve_rows=1, cool_down_rows=4), [row(step, v) for step, v in enumerate(values)])
    assert found == [(0, "firing"), (1, "resolved"), (5, "firing")]


def test_one_certain_observation_is_enough() -> None:
    assert Hysteresis(after=5, resolve=1, cool_down=0).see(bad=True, certain=True)


def test_an_amended_row_counts_once_and_its_late_key_counts() -> None:
    rule = above(rows=2)
    assert told(rule, [row(1, 2.0), row(1, 2.0), row(1, 2.0)]) == []
    assert told(rule, [row(1, None), row(2, 2.0), row(1, 2.0)]) == [(1, "firing")]


def test_a_new_attempt_ends_what_counted_and_drops_the_points_it_repeats() -> None:
    window = Window(10)
    watch = RunWatch([above(rows=2)], halt_on=frozenset())
    assert [watch.take(one) for one in (row(1, 2.0), row(2, 2.0, attempt=2))] == [[], []]
    window.begin_attempt(1, 0)
    from services.metrics.alerts.window import Point

    for step in range(5):
        window.add(Point(step, step, {}))
    window.begin_attempt(2, 3)
    assert [point.step for point in window.points] == [0, 1, 2]


def test_late_words_of_an_earlier_attempt_are_not_heard() -> None:
    assert told(above(), [row(5, 0.0, attempt=2), row(9, 2.0, attempt=1)]) == []


def test_who_reports_on_another_axis_need_not_know_of_attempts() -> None:
    found = told(above(axis="engine/time"), [row(5, 0.0, attempt=2), row(9, 2.0, axis="engine/time")])
    assert found == [(9, "firing")]


def test_a_rule_follows_one_axis() -> None:
    assert told(above(rows=2), [row(1, 2.0), row(1, 2.0, axis="eval/step"), row(2, 2.0)]) == [(2, "firing")]


def test_rules_of_ones_own_of_each_kind() -> None:
    def one(kind: str, **numbers: float) -> Rule:
        return Rule("x", kind, "Do.", keys=("a/x",), numbers=numbers)  # type: ignore[arg-type]

    assert told(one("below", limit=1.0), [row(0, 1.0), row(1, 0.5)]) == [(1, "firing")]
    assert told(one("outside", low=0.0, high=1.0), [row(0, 1.0), row(1, 1.5)]) == [(1, "firing")]
    assert told(one("outside", low=0.0, high=1.0), [row(0, math.nan)]) == [(0, "firing")]
    assert told(one("changes"), [row(0, 1.0), row(1, 1.0), row(2, 2.0)]) == [(2, "firing")]
    assert told(one("missing"), [row(0, None), row(1, 1.0), row(2, None)]) == [(2, "firing")]


def test_nan_is_neither_above_nor_a_spike() -> None:
    assert told(above(), [row(0, math.nan)]) == []


def test_values_that_are_no_numbers_are_left_out() -> None:
    facts = facts_of("r", {"axis": "a", "step": 1, "values": {"a": "NaN", "b": "text", "c": None, "d": 2}}, 7)
    assert set(facts.values) == {"a", "d"} and math.isnan(facts.values["a"]) and facts.attempt == 1


def test_a_rule_is_for_the_runs_of_its_glob() -> None:
    assert fits(above(run="arith-*"), "arith-1") and not fits(above(run="arith-*"), "other")


def test_an_alert_survives_its_own_json() -> None:
    alert = Alert("r", "x", State.FIRING, "critical", "s", "m", 5, "a", 3, 2, {"values": [1, "NaN"]}, True, True, 9)
    assert Alert.from_json(alert.to_json()) == alert
    assert alert.to_proto().attempt == 2 and alert.to_proto().evidence == '{"values":[1,"NaN"]}'
