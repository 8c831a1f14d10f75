"""Values as the text that Prometheus reads, in the format that it asks for. Holds nothing.

A scrape is valid whatever a run's values are called: names are legal, and no family stands twice.
"""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from services.metrics.prometheus.gauges import Gauges

_VALUES = "Newest value in the rows of a run; the label key has its raw name."


@dataclass(frozen=True)
class Health:
    """One number about the service, or one a label."""

    name: str
    """Without furlong_metrics_."""
    text: str
    samples: Sequence[tuple[tuple[tuple[str, str], ...], float]]
    """Labels and value."""
    counts: bool = False
    """It only grows."""


@dataclass(frozen=True)
class Buckets:
    """A histogram about the service."""

    name: str
    text: str
    bounds: Sequence[float]
    counts: Sequence[int]
    """One more than bounds: those above the last."""
    sum: float


def encode(families: Iterable[Metric], *, accept: str, gzipped: bool) -> tuple[bytes, str]:
    """The body, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(list(families)))
    encoder, content_type = choose_encoder(accept)
    body = encoder(registry)
    return (gzip.compress(body, compresslevel=1) if gzipped else body), content_type


def of_values(gauges: Gauges) -> Iterator[Metric]:
    """The values of the rows, and where each axis is."""
    families: dict[str, GaugeMetricFamily] = {}
    for series, value in gauges.standing():
        family = families.get(series.name)
        if family is None:
            family = families[series.name] = GaugeMetricFamily(series.name, _VALUES)
        family.add_sample(series.name, dict(series.labels), value)
    yield from families.values()
    names = ("step", "attempt", "timestamp_seconds")
    texts = ("Step of an axis' newest row.", "Attempt of an axis' newest row.", "When an axis' newest row came.")
    placed = [
        GaugeMetricFamily(f"furlong_row_{name}", text, labels=["run", "axis"])
        for name, text in zip(names, texts, strict=True)
    ]
    for run, axis, *numbers in gauges.places():
        for family, number in zip(placed, numbers, strict=True):
            family.add_metric([run, axis], float(number))
    yield from placed


def of_health(health: Iterable[Health | Buckets]) -> Iterator[Metric]:
    """Numbers about the service."""
    for one in health:
        name = f"furlong_metrics_{one.name}"
        if isinstance(one, Buckets):
            yield _histogram(name, one)
            continue
        kind = CounterMetricFamily if one.counts else GaugeMetricFamily
        family = kind(name, one.text)
        sample = f"{name}_total" if one.counts else name
        for labels, value in one.samples:
            family.add_sample(sample, dict(labels), value)
        yield family


def of_alerts(firing: Iterable[tuple[str, str]]) -> Metric:
    """Run and rule of every alert that fires."""
    family = GaugeMetricFamily("furlong_alert_firing", "1 while a rule fires in a run.", labels=["run", "rule"])
    for run, rule in sorted(set(firing)):
        family.add_metric([run, rule], 1)
    return family


def _histogram(name: str, one: Buckets) -> Metric:
    found, total = [], 0
    for bound, count in zip([*map(str, one.bounds), "+Inf"], one.counts, strict=True):
        total += count
        found.append((bound, total))
    return HistogramMetricFamily(name, one.text, buckets=found, sum_value=one.sum)


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
