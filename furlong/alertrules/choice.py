"""From a run's configuration to its rules: built-in, the rules file, those that are disabled, those that halt."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from furlong.alertrules.builtin import BUILT_IN
from furlong.alertrules.rule import Rule
from furlong.alertrules.rulefile import read_rule_file
from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.config.sections import MetricsSection


@dataclass(frozen=True)
class Chosen:
    """The rules of a run."""

    rules: Mapping[str, Rule]
    """Those that are watched."""
    halt_on: frozenset[str]


def choose_rules(metrics: MetricsSection) -> Chosen:
    """The rules that are watched. Raises ConfigError for what check_alerts finds."""
    chosen, problems = _choose(metrics)
    if problems:
        raise ConfigError(problems)
    return chosen


def check_alerts(metrics: MetricsSection) -> list[Problem]:
    """What is wrong with the rules file and the names of rules, all at once. Reads the file."""
    return _choose(metrics)[1]


def _choose(metrics: MetricsSection) -> tuple[Chosen, list[Problem]]:
    rules, problems, disabled = dict(BUILT_IN), [], set(metrics.disable_alerts)
    if metrics.alert_rules:
        file = read_rule_file(metrics.alert_rules)
        rules.update(file.rules)
        disabled |= file.disabled
        problems += file.problems
    if not problems:  # else rules that are only misspelt would be told twice
        problems += _unknown("disable_alerts", metrics.disable_alerts, rules)
        problems += _unknown("halt_on", metrics.halt_on, rules)
        problems += _never(metrics, disabled)
    watched = {name: rule for name, rule in rules.items() if name not in disabled}
    return Chosen(watched, frozenset(metrics.halt_on)), problems


def _unknown(field: str, names: tuple[str, ...], rules: Mapping[str, Rule]) -> Iterator[Problem]:
    for name in names:
        if name not in rules:
            remedy = f"There are {', '.join(rules)}. More come by --alert-rules FILE."
            yield Problem(f"metrics.{field}", name, "must be the name of an alert rule", remedy)


def _never(metrics: MetricsSection, disabled: set[str]) -> Iterator[Problem]:
    for name in metrics.halt_on:
        if name in disabled:
            remedy = "Take it out of one of the two."
            yield Problem("metrics.halt_on", name, "is disabled, so it would never halt the run", remedy)
