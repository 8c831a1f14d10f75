"""How one number is read from a row's values, by rule. Pure; a row that lacks what is needed gives none."""

from collections.abc import Callable, Mapping

from furlong.alertrules import Rule

Values = Mapping[str, float]


def read(rule: Rule, values: Values) -> float | None:
    """The number that the rule looks at; None: the row says nothing to it."""
    return _READINGS[rule.reading](rule, values)


def _first(rule: Rule, values: Values) -> float | None:
    return values.get(rule.keys[0])


def _ratio(rule: Rule, values: Values) -> float | None:
    """keys[0] as a share of keys[1]."""
    above, below = (values.get(key) for key in rule.keys)
    return above / below if above is not None and below else None


def _longer(rule: Rule, values: Values) -> float | None:
    """How many times the longer of two durations is the shorter; short ones are noise."""
    first, second = (values.get(key) for key in rule.keys)
    if first is None or second is None or max(first, second) < rule.numbers["min_s"]:
        return None
    shorter = min(first, second)
    return max(first, second) / shorter if shorter > 0 else None


def _if_long(rule: Rule, values: Values) -> float | None:
    """keys[0], where the duration keys[1] is long enough to measure by."""
    value, duration = (values.get(key) for key in rule.keys)
    return value if value is not None and duration is not None and duration >= rule.numbers["min_s"] else None


def _unequal_groups(rule: Rule, values: Values) -> float | None:
    """The share of groups with equal rewards that is too much: those that are not all 1, or nearly all of the groups.

    A run that solves its prompts has many groups that are all 1, and is well.
    """
    zero, one, equal = (values.get(key) for key in rule.keys)
    if zero is None and equal is None:
        return None
    one = one or 0.0
    every = equal if equal is not None else (zero or 0.0) + one
    return every if every > rule.numbers["solved"] else every - one


_READINGS: Mapping[str, Callable[[Rule, Values], float | None]] = {
    "first": _first,
    "ratio": _ratio,
    "longer": _longer,
    "if_long": _if_long,
    "unequal_groups": _unequal_groups,
}
