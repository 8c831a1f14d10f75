"""Whether a series' newest point is bad, by kind of rule. Pure functions of a rule and a window.

A judge gives None when it cannot tell yet: too few points.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from furlong.alertrules import Rule
from services.metrics.alerts.alert import shown
from services.metrics.alerts.baseline import baseline_of
from services.metrics.alerts.window import Window


@dataclass(frozen=True)
class Judgement:
    """What a judge finds in the newest point."""

    bad: bool
    what: str = ""
    """The rest of a sentence that begins with the key and its value; only when bad."""
    usual: tuple[float, float] | None = None
    """The usual range, where there is one."""
    certain: bool = False
    """One such point is enough."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """More numbers for the evidence."""


Judge = Callable[[Rule, Window, int], Judgement | None]
"""Rule, window with the newest point in it, and how many points before it were bad too."""

GOOD = Judgement(bad=False)


def judge(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    """Judge the newest point."""
    return _JUDGES[rule.kind](rule, window, num_bad)


def _above(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    limit = rule.numbers["limit"]
    return Judgement(window.points[-1].value > limit, f"above {shown(limit)}", (-math.inf, limit))


def _below(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    limit = rule.numbers["limit"]
    return Judgement(window.points[-1].value < limit, f"below {shown(limit)}", (limit, math.inf))


def _outside(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    low, high = rule.numbers["low"], rule.numbers["high"]
    bad = not low <= window.points[-1].value <= high
    return Judgement(bad, f"outside {shown(low)} to {shown(high)}", (low, high))


def _changes(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    if len(window.points) < 2:
        return None
    before, now = window.points[-2].value, window.points[-1].value
    same = before == now or (math.isnan(before) and math.isnan(now))
    return Judgement(not same, f"changed from {shown(before)}", (before, before))


def _nonfinite(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    """Any key that is not finite, or a count of skipped steps that grew."""
    newest = window.points[-1].values
    broken = [key for key in rule.keys if key in newest and not math.isfinite(newest[key])]
    if broken:
        others = f", {' and '.join(broken[1:])} too" if broken[1:] else ""
        return Judgement(True, f"not finite: {broken[0]} is {newest[broken[0]]}{others}", certain=True)
    counts = [point.values[rule.keys[-1]] for point in window.points if rule.keys[-1] in point.values]
    if len(counts) >= 2 and counts[-1] > counts[-2] and rule.keys[-1] in newest:
        what = f"fine, but {rule.keys[-1]} rose from {shown(counts[-2])} to {shown(counts[-1])}"
        return Judgement(True, what, certain=True)
    return GOOD


def _spike(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    """Far from the median of what was before: in robust deviations, in itself, and beyond all that was."""
    numbers = rule.numbers
    before = window.finite(besides_last=1 + min(num_bad, rule.rows))  # a level that stays becomes usual in time
    value = window.points[-1].value
    if len(before) < numbers["min_points"] or math.isnan(value):
        return None
    usual = baseline_of(before)
    direction = numbers.get("direction", 0)
    away = (value - usual.median) * direction if direction else abs(value - usual.median)
    floor = numbers["floor"] + numbers["relative"] * abs(usual.median)
    bad = away > max(floor, numbers["sigmas"] * usual.sigma) and (num_bad >= rule.rows or away > 1.5 * usual.largest)
    certain = bad and away > max(numbers["at_once"] * usual.sigma, 4 * usual.largest, 4 * floor)
    words = f"far from its usual {shown(usual.usual[0])} to {shown(usual.usual[1])}"
    return Judgement(bad, words, usual.usual, certain, {"median": usual.median, "sigma": usual.sigma})


def _climb(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    """The newest points against the window's oldest, which hold no more than what was long ago."""
    numbers = rule.numbers
    recent = window.finite()[-int(numbers["recent"]) :]
    if len(recent) < numbers["recent"]:
        return None
    now = statistics.median(recent)
    if now > numbers["limit"]:
        return Judgement(True, f"above {shown(numbers['limit'])}", (0.0, numbers["limit"]), facts={"recent": now})
    finite = window.finite()
    if len(finite) < numbers["min_points"]:
        return GOOD if num_bad else None
    then = statistics.median(finite[: max(5, int(numbers["min_points"]) // 2)])
    bad = now > numbers["floor"] and now > numbers["ratio"] * then
    what = f"{shown(now / then) if then else 'many'} times the {shown(then)} that it was {len(finite)} rows ago"
    return Judgement(bad, what, (0.0, numbers["ratio"] * then), facts={"recent": now, "reference": then})


def _collapse(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    """From above `start` to below `floor` within the window. It stays bad while it stays down there."""
    numbers = rule.numbers
    recent = int(numbers["recent"])
    finite = window.finite()
    if len(finite) < recent + 1:
        return None
    now = statistics.median(finite[-recent:])
    if now >= numbers["floor"]:
        return GOOD
    highest = max(finite)
    bad = highest > numbers["start"] or num_bad > 0
    what = f"below {shown(numbers['floor'])}; it was {shown(highest)} within the last {len(finite)} rows"
    return Judgement(bad, what, (numbers["floor"], math.inf), facts={"recent": now, "highest": highest})


def _constant(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    """No variance: the mean sits at one value, or all samples have the same reward, row after row.

    fallen: 1 asks that the value is below what the series has been, 0 that it is not.
    """
    numbers = rule.numbers
    count = int(numbers["still_rows"])
    if len(window.points) < count:
        return None
    last = list(window.points)[-count:]
    values = [point.value for point in last]
    spreads = [point.values.get(rule.keys[1]) for point in last]
    if not all(math.isfinite(value) for value in values):
        return None
    tolerance = numbers["tolerance"]
    still = max(values) - min(values) <= tolerance
    flat = all(spread is not None and spread <= tolerance for spread in spreads)
    if not still and not flat:
        return GOOD
    best = max(window.finite())
    fallen = best - values[-1] > max(tolerance, 0.01 * abs(best))
    what = f"at one value for {count} rows; its best was {shown(best)}"
    return Judgement(fallen == bool(numbers["fallen"]), what, facts={"best": best})


def _share(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    """The share of the last rows in which a 0-or-1 value is 1."""
    size = int(rule.numbers["window"])
    values = window.finite()[-size:]
    if len(values) < size:
        return None
    share = sum(value > 0 for value in values) / size
    what = f"so in {share:.0%} of the last {size} rows"
    return Judgement(share >= rule.numbers["share"], what, facts={"share": share})


def _fall(rule: Rule, window: Window, num_bad: int) -> Judgement | None:
    before = window.finite(besides_last=1 + min(num_bad, rule.rows))
    if len(before) < rule.numbers["min_points"]:
        return None
    usual = baseline_of(before)
    value = window.points[-1].value
    what = f"below {rule.numbers['share']:.0%} of its median {shown(usual.median)}"
    return Judgement(value < rule.numbers["share"] * usual.median, what, usual.usual, facts={"median": usual.median})


_JUDGES: Mapping[str, Judge] = {
    "above": _above,
    "below": _below,
    "outside": _outside,
    "changes": _changes,
    "nonfinite": _nonfinite,
    "spike": _spike,
    "climb": _climb,
    "collapse": _collapse,
    "constant": _constant,
    "share": _share,
    "fall": _fall,
}
