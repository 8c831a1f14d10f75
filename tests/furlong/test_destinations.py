"""What the addresses of sinks and endpoints must look like: told before anything starts, each by its key."""

from pathlib import Path

import pytest

from furlong.config import RunConfig
from furlong.config.destinations import check_destinations, host_and_port, is_loopback, url_of
from furlong.config.rules import check_metrics
from furlong.config.sections import MetricsSection, RunSection


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("statsd_addr", "localhost", "localhost:8125"),
        ("statsd_addr", "h:0", "[::1]:1"),
        ("otlp_endpoint", "collector:4318", "http://collector:4318"),
        ("metrics_webhook", "ftp://h/x", "https://h/x"),
        ("metrics_webhook", "http://h:port/x", "http://h:1/x"),
        ("mlflow_tracking_uri", "http://", "sqlite:///x.db"),
        ("scrape", ("h:1",), ("engine-0=http://h:1",)),
    ],
)
def test_wrong_place_is_told_by_its_key(field: str, bad: object, good: object) -> None:
    assert [problem.key for problem in check_destinations(MetricsSection.model_validate({field: bad}))] == [
        f"metrics.{field}"
    ]
    assert check_destinations(MetricsSection.model_validate({field: good})) == []


def test_all_are_told_at_once_and_without_what_may_be_secret() -> None:
    metrics = MetricsSection(statsd_addr="x", otlp_endpoint="s3cret", metrics_webhook="s3cret", scrape=("x",))
    told = "\n".join(map(str, check_metrics(RunConfig(metrics=metrics))))
    assert len(told.splitlines()) == 4 and "s3cret" not in told


def test_parts_of_an_address_come_without_brackets() -> None:
    assert host_and_port("[::1]:8125") == ("::1", 8125)


def test_rules_of_alerts_are_refused_where_a_shared_service_has_them(tmp_path: Path) -> None:
    def told(**metrics: object) -> list[str]:
        shared = MetricsSection(metrics_addr="127.0.0.1:1", **metrics)  # type: ignore[arg-type]
        return [problem.key for problem in check_metrics(RunConfig(run=RunSection(name="mine"), metrics=shared))]

    assert told(disable_alerts=("repetition",)) == ["metrics.disable_alerts"]
    assert told(alert_webhook="http://h/x") == ["metrics.alert_webhook"]
    assert told(alert_rules="rules.toml") == ["metrics.alert_rules"]
    assert told(alert_rules="rules.toml", halt_on=("mine",)) == []


def test_url_that_stands_in_a_file_is_read_and_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("https://example.org/hook/secret-part\n")
    (tmp_path / "bad").write_text("nothing")
    assert url_of(f"@{tmp_path}/url") == "https://example.org/hook/secret-part"
    assert not check_destinations(MetricsSection(metrics_webhook=f"@{tmp_path}/url"))
    (missing,) = check_destinations(MetricsSection(metrics_webhook=f"@{tmp_path}/none"))
    assert "none, which cannot be read: No such file" in str(missing)
    assert check_destinations(MetricsSection(metrics_webhook=f"@{tmp_path}/bad"))


def test_what_is_of_this_host_alone() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "[::1]", "::1", "localhost", "a.localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "localhost.example.com")))
