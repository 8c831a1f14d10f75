"""The table of what was measured, and whether each limit holds. Pure."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.routerbench.peers import DIRECT, OURS, OURS_2, SGLANG

Results = Mapping[str, Sequence[Mapping[str, float]]]
"""By peer, the figures of each round."""
MEGABYTES_A_MIB = 1.048576


@dataclass(frozen=True)
class Verdict:
    """One line of what the router promises."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def held(self) -> bool:
        """Whether the limit holds."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> dict[str, object]:
        """For a JSON line."""
        rule = "at least" if self.at_least else "at most"
        value, limit = round(self.value, 3), round(self.limit, 3)
        return {"limit": self.name, "value": value, rule: limit, "unit": self.unit, "held": self.held}


def verdicts(results: Results) -> list[Verdict]:
    """All that can be told from what was measured."""
    made = [make(results) for make in _LIMITS]
    return [one for one in made if one is not None and not math.isnan(one.value) and not math.isnan(one.limit)]


def not_told(results: Results) -> int:
    """How many limits could not be checked with what is here."""
    return len(_LIMITS) - len(verdicts(results))


def median(results: Results, peer: str, figure: str) -> float:
    """Of all rounds; NaN: it was not measured."""
    values = [row[figure] for row in results.get(peer, ()) if figure in row]
    return statistics.median(values) if values else math.nan


def least(results: Results, peer: str, figure: str) -> float:
    """Of all rounds: for what a busy machine only adds to. NaN: it was not measured."""
    return min((row[figure] for row in results.get(peer, ()) if figure in row), default=math.nan)


def table(results: Results) -> str:
    """Figures down, peers across: median (least..most)."""
    names = list(results)
    figures = list(dict.fromkeys(key for rows in results.values() for row in rows for key in row))
    lines = [f"{'':22}" + "".join(f"{name:>24}" for name in names)]
    for figure in figures:
        cells = [_cell([row[figure] for row in results[name] if figure in row]) for name in names]
        lines.append(f"{figure:22}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = _short(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_short(min(values))}..{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


Make = Callable[[Results], Verdict | None]


def _best(results: Results, peer: str, figure: str, *, most: bool) -> float:
    """Of the round that others disturbed least: they only take from a rate, and only add to the cost of a request."""
    rows = [row for row in results.get(peer, ()) if figure in row]
    values = [row[figure] for row in rows if _in_time(row)] or [row[figure] for row in rows]
    return (max if most else min)(values, default=math.nan)


def _in_time(row: Mapping[str, float]) -> bool:
    """A router that others kept from running passes several chunks on at once, which makes each of them cheap."""
    return row.get("streams over s", 0.0) < 0.15


def _ratio(name: str, figure: str, *, at_least: bool = False) -> Make:
    def make(results: Results) -> Verdict:
        ours, other = (_best(results, peer, figure, most=at_least) for peer in (OURS, SGLANG))
        return Verdict(name, ours / other if other else math.nan, 1.0, f"times {SGLANG}", at_least)

    return make


def _figure(name: str, figure: str, limit: float, unit: str, *, times: float = 1.0) -> Make:
    return lambda results: Verdict(name, times * median(results, OURS, figure), limit, unit)


def _added_latency(results: Results) -> Verdict:
    base = least(results, DIRECT, "p50 us c=1")
    ours, other = (least(results, name, "p50 us c=1") - base for name in (OURS, SGLANG))
    return Verdict("added latency at concurrency 1", ours, other, "us at the median; limit: sglang-router's")


def _first_byte(results: Results) -> Verdict:
    added = least(results, OURS, "first byte ms") - least(results, DIRECT, "first byte ms")
    return Verdict("first streamed byte later than direct", added, 0.4, "ms")


def _crowd(results: Results) -> Verdict:
    return Verdict("2,048 requests of 2 s: over the ideal", least(results, OURS, "crowd over s"), 0.3, "s")


def _refused(results: Results) -> Verdict:
    row = results.get(OURS, [{}])[0]
    return Verdict("idle connections that are open", row.get("open", math.nan), row.get("asked", 0), "", at_least=True)


def _scaling(results: Results) -> Verdict:
    """Two processes by one. Where load and two processes have not a processor each, rates cannot show it: then by the
    processor time that a request takes of the busier process, whose core would be full first."""
    if not median(results, OURS_2, "apart"):
        of_busiest = median(results, OURS_2, "cpu/10k c=64") * median(results, OURS_2, "busiest share c=64")
        times = median(results, OURS, "cpu/10k c=64") / of_busiest if of_busiest else math.nan
        return Verdict("two processes", times, 1.7, "times one, by processor time", at_least=True)
    rates = median(results, OURS_2, "req/s c=64") / median(results, OURS, "req/s c=64")
    return Verdict("two processes", rates, 1.7, "times one, by requests a second", at_least=True)


def _errors(results: Results) -> Verdict:
    rows = results.get(OURS, ())
    wrong = [value for row in rows for key, value in row.items() if key.startswith("errors") or key.endswith("failed")]
    return Verdict("requests that failed", sum(wrong) if wrong else math.nan, 0, "")


_LIMITS: Sequence[Make] = (
    _ratio("processor time of a request at concurrency 64", "cpu/10k c=64"),
    _ratio("requests a second at concurrency 64", "req/s c=64", at_least=True),
    _added_latency,
    _errors,
    _crowd,
    _refused,
    _figure("10,000 open connections", "open MiB", 400.0, "MB", times=MEGABYTES_A_MIB),
    _first_byte,
    _ratio("processor time of a streamed chunk", "cpu/10k chunks"),
    _figure("peak memory with bodies of 40 MB", "40 MB peak MiB", 70.0, "MB", times=MEGABYTES_A_MIB),
    _scaling,
)
