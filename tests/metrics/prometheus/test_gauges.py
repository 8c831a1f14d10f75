"""What Prometheus is shown: legal, told apart, the newest and nothing taken back."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from services.metrics.prometheus.exposition import encode, of_alerts, of_values
from services.metrics.prometheus.gauges import Gauges, fold
from services.metrics.sinks.drawn import Drawn

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def row(
    step: int, attempt: int = 1, *, run: str = "r", axis: str = "train/step", at_s: float = 1e9, **v: float
) -> Drawn:
    return Drawn(
        step, run, axis, step, attempt, int(at_s * 1e6), {k.replace("__", "/"): x for k, x in v.items()}, {}, {}
    )


def shown(gauges: Gauges) -> dict[str, float]:
    return {dict(series.labels)["key"]: value for series, value in gauges.standing()}


def scrape(gauges: Gauges, accept: str = "") -> dict[tuple[str, str], float]:
    """By name and raw key, through the strict parser of the format asked for."""
    body, _ = encode([*of_values(gauges), of_alerts([("r", "x")])], accept=accept, gzipped=False)
    parse = parse_openmetrics if accept else parse_text
    samples = [sample for family in parse(body.decode()) for sample in family.samples]
    return {(s.name, s.labels["key"]): s.value for s in samples if "key" in s.labels}


def test_odd_names_make_a_valid_scrape_and_are_told_apart() -> None:
    gauges = Gauges(stale_after_s=60)
    values = {"val-aux/openai/gsm8k/reward/mean@1": 0.17, "train/loss": 0.4, "train.loss": 0.5}
    gauges.take([Drawn(1, "r", "train/step", 1, 1, 1, values, {}, {})])
    assert (
        scrape(gauges)
        == scrape(gauges, OPENMETRICS)
        == {
            ("furlong_val_aux_openai_gsm8k_reward_mean_1", "val-aux/openai/gsm8k/reward/mean@1"): 0.17,
            ("furlong_train_loss", "train/loss"): 0.4,
            ("furlong_train_loss", "train.loss"): 0.5,
        }
    )


def test_key_on_two_axes_of_a_run_is_told_apart() -> None:
    gauges = Gauges(stale_after_s=60)
    gauges.take([row(1, loss=0.4, once=7), row(9, axis="eval/step", loss=0.9)])
    found = {(dict(series.labels)["key"], dict(series.labels).get("axis")): v for series, v in gauges.standing()}
    assert found == {("loss", "train/step"): 0.4, ("loss", "eval/step"): 0.9, ("once", None): 7}
    assert len({series for series, _ in gauges.standing()}) == 3  # a series that stands twice costs the whole scrape


@given(st.dictionaries(st.text(max_size=40), st.floats(), max_size=8), st.text(max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_name_and_number_makes_a_valid_scrape(values: dict[str, float], run: str) -> None:
    gauges = Gauges(stale_after_s=60)
    gauges.take([Drawn(1, run, "train/step", 1, 1, 1, values, {}, {})])
    for accept in ("", OPENMETRICS):
        found = {key: value for (_, key), value in scrape(gauges, accept).items()}
        assert set(found) == set(values)
        assert all(found[k] == v or (math.isnan(found[k]) and math.isnan(v)) for k, v in values.items())


def test_no_key_takes_a_name_of_the_service_itself() -> None:
    assert fold("metrics/records") == "furlong_key_metrics_records"
    assert fold("row/step") == "furlong_key_row_step"
    assert fold("alert-firing") == "furlong_key_alert_firing"
    assert fold("rows") == "furlong_rows"


def test_value_of_an_older_step_changes_nothing() -> None:
    gauges = Gauges(stale_after_s=60)
    gauges.take([row(1, a=1), row(3, a=3), row(2, a=2, late=2)])
    assert shown(gauges) == {"a": 3, "late": 2}


def test_newer_attempt_takes_back_what_it_has_not_said_again() -> None:
    gauges = Gauges(stale_after_s=60)
    gauges.take([row(90, early=1), row(150, a=150, b=150), row(100, 2, a=100)])
    assert shown(gauges) == {"early": 1, "a": 100}
    assert gauges.num_series == 2


def test_run_that_is_silent_is_dropped() -> None:
    gauges = Gauges(stale_after_s=60)
    gauges.take([row(1, run="old", at_s=100, a=1), row(1, run="new", at_s=150, b=1)])
    gauges.forget_stale(now=165)
    assert shown(gauges) == {"b": 1} and gauges.num_series == 1


def test_engine_is_a_label_and_an_engine_that_is_gone_is_dropped_alone() -> None:
    gauges = Gauges(stale_after_s=600)
    gauges.take(
        [
            row(1, axis="engine/time", at_s=100, engine__e0__load=1),
            row(200, axis="engine/time", at_s=300, engine__e1__load=2),
        ]
    )
    gauges.forget_stale(now=300)
    series = [series for series, _ in gauges.standing()]
    assert [(s.name, dict(s.labels)["engine"]) for s in series] == [("furlong_engine_load", "e1")]


def test_router_that_is_gone_is_dropped_alone() -> None:
    gauges = Gauges(stale_after_s=600)
    gauges.take([row(100, axis="router/time", at_s=100, router__queued=3), row(1, at_s=300, loss=1)])
    gauges.forget_stale(now=220)
    assert len(list(gauges.standing())) == 2
    gauges.forget_stale(now=221)
    assert shown(gauges) == {"loss": 1}
