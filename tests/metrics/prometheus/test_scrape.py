"""GET /metrics of the service: by hand, and by Prometheus itself."""

import gzip
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.metrics.prometheus.scraping import prometheus_scraping
from tests.metrics.running import MetricsProcess, batch, part, send, until

Make = Callable[..., MetricsProcess]
VALUES: dict[str, object] = {
    "train/loss": ["last", -0.4],
    "val/x@1": ["last", 0.17],
    "val/x-1": ["last", 2],
    "train/kl": ["last", "NaN"],
}


def scrape(service: MetricsProcess, **headers: str) -> dict[tuple[str, str], float]:
    """By name and raw key, sink, run or nothing."""
    request = urllib.request.Request(f"{service.http}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        body = answer.read()
        text = gzip.decompress(body) if answer.headers["Content-Encoding"] == "gzip" else body
    found = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    return {(s.name, s.labels.get("key") or s.labels.get("sink") or s.labels.get("run") or ""): s.value for s in found}


def test_scrape_says_values_and_health(make: Make) -> None:
    service = make().start()
    send(service, batch([b'{"event": "x"}', b"not json", part(7, VALUES)]))
    service.wait_row(7)
    until(lambda: scrape(service)["furlong_metrics_sink_rows_behind", "jsonl"] == 0, "the sink's cursor to follow")
    found = scrape(service)
    assert (found["furlong_train_loss", "train/loss"], found["furlong_val_x_1", "val/x@1"]) == (-0.4, 0.17)
    assert found["furlong_row_step", "r"] == 7
    assert found["furlong_metrics_records", ""] >= 2
    assert found["furlong_metrics_refused_events_total", ""] == 1
    assert found["furlong_metrics_disk_free_bytes", ""] > 0
    assert found["furlong_metrics_commit_seconds_count", ""] > 0
    assert set(found) == set(scrape(service, **{"Accept-Encoding": "gzip"}))


def test_alert_that_fires_is_shown(make: Make) -> None:
    service = make().start()
    send(service, batch([part(1, {"train/loss": ["last", "NaN"]})]))
    until(lambda: ("furlong_alert_firing", "r") in scrape(service), "the alert")
    assert scrape(service)["furlong_alert_firing", "r"] == 1


def test_scrape_follows_rows_and_survives_a_restart(make: Make) -> None:
    service = make().start()
    for step in (1, 2):
        send(service, batch([part(step, {"train/loss": ["last", step]})], first=step))
        service.wait_row(step)
        assert scrape(service)["furlong_train_loss", "train/loss"] == step
    service.kill()
    service.start()
    assert scrape(service)["furlong_train_loss", "train/loss"] == 2


@pytest.mark.tools
def test_prometheus_shows_the_values_told_apart(make: Make, tmp_path: Path) -> None:
    service = make().start()
    send(service, batch([part(7, VALUES)]))
    service.wait_row(7)
    with prometheus_scraping(tmp_path, service.http) as ask:
        until(lambda: ask('furlong_train_loss{run="r"}'), "the value in Prometheus", limit_s=60)
        shown = {found["metric"]["key"]: found["value"][1] for found in ask('{__name__=~"furlong_(train|val)_.+"}')}
        assert shown == {
            "train/loss": "-0.4",
            "val/x@1": "0.17",
            "val/x-1": "2",
            "train/kl": "NaN",
            "train/kl/nonfinite": "1",
        }
        assert [found["value"][1] for found in ask("up")] == ["1"]
        assert ask('furlong_metrics_sink_state{sink="jsonl",state="healthy"} == 1')
        assert ask("histogram_quantile(0.5, furlong_metrics_commit_seconds_bucket)")
        send(service, batch([part(8, {"train/loss": ["last", 3]})], first=2))
        until(lambda: [f["value"][1] for f in ask("furlong_train_loss")] == ["3"], "the newer value", limit_s=30)
