"""What a Prometheus endpoint says, as values of a row. The only file that parses Prometheus' text. Pure.

| family | values |
|---|---|
| gauge | NAME, as it is |
| counter | NAME_per_s, since the reading before |
| histogram, summary | NAME_count_per_s, NAME_sum_per_s and NAME_mean, over what came since the reading before |

A counter that is lower than before has begun anew from zero. A prefix such as `sglang:` is left out, and so are labels
that say nothing new within one instance; the others stand in the name: `http_requests_per_s{endpoint=/generate}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from furlong.records import Mean, Value

MAX_BYTES = 16 * 1024 * 1024
_LEFT_OUT = {"engine_type", "model_name", "pid", "le", "component"}
_DISTRIBUTIONS = ("histogram", "summary")


@dataclass(frozen=True)
class Exposition:
    """One reading."""

    at_s: float
    """Of the monotonic clock."""
    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)


def parse(text: str, at_s: float) -> Exposition:
    """Raises ValueError when it is no Prometheus text."""
    read = Exposition(at_s)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = _key(sample.name, sample.labels)
            if family.type == "counter" and sample.name.endswith("_total"):
                _add(read.counters, _key(sample.name.removesuffix("_total"), sample.labels), sample.value)
            elif family.type in _DISTRIBUTIONS and sample.name.endswith("_sum"):
                _add(read.sums, _key(sample.name.removesuffix("_sum"), sample.labels), sample.value)
            elif family.type in _DISTRIBUTIONS and sample.name.endswith("_count"):
                _add(read.counts, _key(sample.name.removesuffix("_count"), sample.labels), sample.value)
            elif family.type in ("gauge", "unknown", "untyped") or "quantile" in sample.labels:
                read.gauges[name] = sample.value
    return read


def values(now: Exposition, before: Exposition | None) -> dict[str, Value]:
    """The values of a reading. Rates need the one before."""
    row: dict[str, Value] = {name: Mean(value, 1) for name, value in now.gauges.items()}
    if before is None or now.at_s <= before.at_s:
        return row
    took_s = now.at_s - before.at_s
    for name, value in now.counters.items():
        if name in before.counters:
            row[_with_suffix(name, "_per_s")] = Mean(_grown(value, before.counters[name]), took_s)
    for name, count in now.counts.items():
        if name not in before.counts:
            continue
        num_new = _grown(count, before.counts[name])
        row[_with_suffix(name, "_count_per_s")] = Mean(num_new, took_s)
        if name in now.sums and name in before.sums:
            reset = count < before.counts[name]
            new = now.sums[name] if reset else now.sums[name] - before.sums[name]
            row[_with_suffix(name, "_sum_per_s")] = Mean(new, took_s)
            if num_new > 0:
                row[_with_suffix(name, "_mean")] = Mean(new, num_new)
    return row


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now


def _add(into: dict[str, float], name: str, value: float) -> None:
    """Series that differ only in labels that are left out are one."""
    into[name] = into.get(name, 0.0) + value


def _key(name: str, labels: Mapping[str, str]) -> str:
    shown = {
        label: value
        for label, value in labels.items()
        if label not in _LEFT_OUT and not (label.endswith("_rank") and value == "0")
    }
    bare = name.split(":", 1)[-1]
    return bare + "{" + ",".join(f"{k}={v:.64}" for k, v in sorted(shown.items())) + "}" if shown else bare


def _with_suffix(key: str, suffix: str) -> str:
    name, brace, labels = key.partition("{")
    return name + suffix + brace + labels
