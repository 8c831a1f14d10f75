"""What a Prometheus endpoint says, as values of a row. The only file that parses Prometheus' text. Pure.

| family | values |
|---|---|
| gauge | NAME, as it is |
| counter | NAME_per_s, since the reading before |
| histogram, summary | NAME_count_per_s, NAME_sum_per_s and NAME_mean, over what came since the reading before |

A counter that is lower than before has begun anew from zero. A prefix such as `sglang:` is left out, and so are labels
that say nothing new within one instance; the others stand in the name: `http_requests_per_s{endpoint=/generate}`.
Series that differ only in what is left out add up, but for gauges: those keep all labels.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from furlong.records import Mean, Value

MAX_BYTES = 16 * 1024 * 1024
_LEFT_OUT = {"engine_type", "model_name", "pid", "le", "component"}
_DISTRIBUTIONS = ("histogram", "summary")
_Series = tuple[str, str]
"""What it is called in a row, and with all its labels."""


@dataclass(frozen=True)
class Exposition:
    """One reading. What grows stands here series by series: of several that become one value, one may begin anew, or
    go, alone."""

    at_s: float
    """Of the monotonic clock."""
    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[_Series, float] = field(default_factory=dict)
    sums: dict[_Series, float] = field(default_factory=dict)
    counts: dict[_Series, float] = field(default_factory=dict)


def parse(text: str, at_s: float) -> Exposition:
    """Raises ValueError when it is no Prometheus text."""
    read = Exposition(at_s)
    gauges: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels = sample.name, sample.labels
            if family.type == "counter" and name.endswith("_total"):
                read.counters[_series(name.removesuffix("_total"), labels)] = sample.value
            elif family.type in _DISTRIBUTIONS and name.endswith("_sum"):
                read.sums[_series(name.removesuffix("_sum"), labels)] = sample.value
            elif family.type in _DISTRIBUTIONS and name.endswith("_count"):
                read.counts[_series(name.removesuffix("_count"), labels)] = sample.value
            elif family.type in ("gauge", "unknown", "untyped") or "quantile" in labels:
                gauges.setdefault(_key(name, labels), {})[_key(name, labels, whole=True)] = sample.value
    for key, found in gauges.items():  # two that differ only in what is left out are no one gauge
        read.gauges.update(found if len(found) > 1 else {key: next(iter(found.values()))})
    return read


def values(now: Exposition, before: Exposition | None) -> dict[str, Value]:
    """The values of a reading. Rates need the one before."""
    row: dict[str, Value] = {name: Mean(value, 1) for name, value in now.gauges.items()}
    if before is None or now.at_s <= before.at_s:
        return row
    took_s = now.at_s - before.at_s
    for name, num_new in _growth(now.counters, before.counters).items():
        row[_with_suffix(name, "_per_s")] = Mean(num_new, took_s)
    sums = _growth(now.sums, before.sums, begun_anew=_fallen(now.counts, before.counts))
    for name, num_new in _growth(now.counts, before.counts).items():
        row[_with_suffix(name, "_count_per_s")] = Mean(num_new, took_s)
        if name in sums:
            row[_with_suffix(name, "_sum_per_s")] = Mean(sums[name], took_s)
            if num_new > 0:
                row[_with_suffix(name, "_mean")] = Mean(sums[name], num_new)
    return row


def _growth(
    now: Mapping[_Series, float], before: Mapping[_Series, float], begun_anew: Collection[_Series] | None = None
) -> dict[str, float]:
    """By how much each name grew since the reading before. A series that is new beside known ones of its name began at
    zero since; a name that is new altogether may have begun long ago, and is left out.

    begun_anew: which series have. None: those that are lower than before.
    """
    fallen = _fallen(now, before) if begun_anew is None else begun_anew
    known = {name for name, _ in before}
    grown: dict[str, float] = {}
    for series, value in now.items():
        if series[0] in known:
            since = 0.0 if series in fallen else before.get(series, 0.0)
            grown[series[0]] = grown.get(series[0], 0.0) + value - since
    return grown


def _fallen(now: Mapping[_Series, float], before: Mapping[_Series, float]) -> set[_Series]:
    return {series for series, value in now.items() if value < before.get(series, 0.0)}


def _series(name: str, labels: Mapping[str, str]) -> _Series:
    return _key(name, labels), _key(name, labels, whole=True)


def _key(name: str, labels: Mapping[str, str], *, whole: bool = False) -> str:
    """What a series is called in a row. whole: with the labels that are left out there."""
    shown = {
        label: value
        for label, value in labels.items()
        if whole or (label not in _LEFT_OUT and not (label.endswith("_rank") and value == "0"))
    }
    bare = name.split(":", 1)[-1]
    return bare + "{" + ",".join(f"{k}={v:.64}" for k, v in sorted(shown.items())) + "}" if shown else bare


def _with_suffix(key: str, suffix: str) -> str:
    name, brace, labels = key.partition("{")
    return name + suffix + brace + labels
