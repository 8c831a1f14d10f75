"""Reads a TOML file of alert rules: rules of one's own, and other thresholds for the built-in ones.

    [rules.reward_low]                 # one of our own
    key = "rollout/raw_reward"
    when = "below"                     # above, below, outside, changes, missing, no_row_for
    value = 0.1
    rows = 5
    remedy = "Look at the reward function."

    [rules.loss_spike]                 # a built-in one
    sigmas = 15
    severity = "warning"

Every fault in it becomes a Problem that names the rule, the key, the value and what to do. Starts nothing.
"""

import dataclasses
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from furlong.alertrules.builtin import BUILT_IN
from furlong.alertrules.rule import SEVERITIES, Rule
from furlong.config.errors import Problem

WHEN: Mapping[str, tuple[str, ...]] = {
    "above": ("value",),
    "below": ("value",),
    "outside": ("low", "high"),
    "changes": (),
    "missing": (),
    "no_row_for": ("seconds",),
}
"""What a rule of one's own can look for -> the numbers that it then needs."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_ROW_COUNTS = ("rows", "resolve_rows", "cool_down_rows")
_COMMON = ("severity", "remedy", "run", "enabled", "diverged")
_OWN = ("key", "when", "axis", "value", "low", "high", "seconds", *_ROW_COUNTS, *_COMMON)
_POSITIVE_WHOLE = ("window", "min_points", "recent", "still_rows", "min_closed", "beats")
MAX_WINDOW = 1_000
MAX_BYTES = 1024 * 1024

Table = Mapping[str, object]
Checked = TypeVar("Checked")
Default = TypeVar("Default")


@dataclasses.dataclass(frozen=True)
class RuleFile:
    """What a file says, as far as it is sound; and what is wrong with it."""

    rules: Mapping[str, Rule]
    """Built-in rules that it changes, and its own."""
    disabled: frozenset[str]
    problems: tuple[Problem, ...]


def read_rule_file(path: str) -> RuleFile:
    """Read the file. Never raises: what is wrong is told in `problems`."""
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"must be a file that can be read, seen from {Path.cwd()}: {error.strerror or error}"
        return _refused(Problem("metrics.alert_rules", path, rule, "Paths are relative to the folder of the command."))
    except (ValueError, RecursionError) as error:  # also what tomllib and the decoder raise
        return _refused(Problem("metrics.alert_rules", path, f"must be TOML: {error}", "Mend the file at that place."))
    return _read_tree(tree, path)


def _refused(problem: Problem) -> RuleFile:
    return RuleFile({}, frozenset(), (problem,))


def _read_tree(tree: Table, path: str) -> RuleFile:
    problems = [
        Problem(f"{path}: {key}", value, "is not known here", "Rules stand in tables of their own: [rules.NAME].")
        for key, value in tree.items()
        if key != "rules"
    ]
    tables = tree.get("rules", {})
    if not isinstance(tables, dict):
        problems.append(Problem(f"{path}: rules", tables, "must be a table of rules", "Write [rules.NAME]."))
        tables = {}
    rules: dict[str, Rule] = {}
    disabled = set()
    for name, table in tables.items():
        read = _RuleTable(f"{path}: rules.{name}", name, table)
        rule = read.rule()
        problems += read.problems
        if rule is not None:
            rules[name] = rule
        if read.disabled:
            disabled.add(name)
    return RuleFile(rules, frozenset(disabled), tuple(problems))


class _RuleTable:
    """One table of the file on its way to a rule."""

    def __init__(self, where: str, name: str, table: object) -> None:
        self.problems: list[Problem] = []
        self.disabled = False
        self._where, self._name = where, name
        self._table: Table = table if isinstance(table, dict) else {}
        if not isinstance(table, dict):
            self.problems.append(Problem(where, table, "must be a table", f"Write [rules.{name}] and its keys below."))

    def rule(self) -> Rule | None:
        """The rule; None when it cannot be one."""
        if self.problems:
            return None
        if not _NAME.fullmatch(self._name):
            rule = "must be a name of letters, digits and _, beginning with a letter, of at most 64"
            self.problems.append(Problem(self._where, self._name, rule, "For example [rules.reward_low]."))
            return None
        base = BUILT_IN.get(self._name)
        built = self._own() if base is None else self._changed(base)
        self.disabled = self._take("enabled", _boolean, True) is False
        return None if self.problems else built

    # -- a built-in rule with other numbers

    def _changed(self, base: Rule) -> Rule:
        counts = _ROW_COUNTS if base.is_of_rows else ()
        known = (*base.numbers, *counts, *_COMMON)
        self._refuse_unknown(known, f"{self._name} takes {', '.join(known)}")
        numbers = {key: self._number_of(key, default) for key, default in base.numbers.items()}
        return self._with_common(dataclasses.replace(base, numbers=numbers))

    def _number_of(self, key: str, default: float) -> float:
        check = _window_count if key in _POSITIVE_WHOLE else _number
        return self._take(key, check, default)

    # -- a rule of the user's own

    def _own(self) -> Rule | None:
        self._refuse_unknown(_OWN, f"a rule of your own takes {', '.join(_OWN)}")
        names = ", ".join(BUILT_IN)
        if "key" not in self._table and "when" not in self._table:
            rule = "is no built-in rule, and says neither key nor when"
            remedy = f"Built-in are {names}. For a rule of your own give key and when."
            self.problems.append(Problem(self._where, dict(self._table), rule, remedy))
            return None
        key = self._take("key", _text, None, remedy='For example key = "rollout/raw_reward".')
        when = self._take("when", _when, None, remedy=f"One of {', '.join(WHEN)}.")
        if key is None or when is None:
            return None
        numbers = self._own_numbers(when)
        rule = Rule(self._name, when, "Look at the value.", keys=(key,), numbers=numbers)  # type: ignore[arg-type]
        rule = dataclasses.replace(rule, axis=self._take("axis", _text, ""))
        return self._with_common(rule)

    def _own_numbers(self, when: str) -> dict[str, float]:
        for key in ("value", "low", "high", "seconds"):
            if key in self._table and key not in WHEN[when]:
                needs = f"it takes {', '.join(WHEN[when])}" if WHEN[when] else "it takes no number"
                self._problem(key, f'has no meaning with when = "{when}"', f"Leave it out: {needs}.")
        check = _above_zero if when == "no_row_for" else _number
        found = {key: self._take(key, check, None, remedy=f'when = "{when}" needs it.') for key in WHEN[when]}
        numbers = {"limit" if key == "value" else key: number for key, number in found.items() if number is not None}
        if when == "outside" and len(numbers) == 2 and numbers["low"] >= numbers["high"]:
            self._problem("low", f"must be below high ({numbers['high']:g})", "Swap the two.")
        return numbers

    # -- what all have

    def _with_common(self, rule: Rule) -> Rule:
        counts = {name: self._take(name, _count(name), getattr(rule, name)) for name in _ROW_COUNTS}
        return dataclasses.replace(
            rule,
            rows=counts["rows"],
            resolve_rows=counts["resolve_rows"],
            cool_down_rows=counts["cool_down_rows"],
            severity=self._take("severity", _severity, rule.severity),  # type: ignore[arg-type]
            remedy=self._take("remedy", _text, rule.remedy),
            run=self._take("run", _text, rule.run),
            diverged=self._take("diverged", _boolean, rule.diverged),
        )

    def _refuse_unknown(self, known: tuple[str, ...], what: str) -> None:
        for key in self._table:
            if key not in known:
                self._problem(key, "is not known here", f"{what}.")

    def _take(
        self, key: str, check: Callable[[object], Checked], default: Checked | Default, *, remedy: str = ""
    ) -> Checked | Default:
        """The checked value of a key; its default when it is not there. No default: it must be."""
        if key not in self._table:
            if default is None:
                self._problem(key, "must be given", remedy, value="")
            return default
        try:
            return check(self._table[key])
        except ValueError as error:
            self._problem(key, str(error), remedy or f"Leave it out for {default!r}." if default != "" else remedy)
            return default

    def _problem(self, key: str, rule: str, remedy: str, *, value: object = None) -> None:
        shown = self._table.get(key) if value is None else value
        place = (
            f"{self._where} key" if key == "key" else f"{self._where}.{key}"
        )  # a name that ends so is taken as secret
        self.problems.append(Problem(place, shown, rule, remedy))


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    return float(value)


def _above_zero(value: object) -> float:
    number = _number(value)
    if number <= 0:
        raise ValueError("must be above 0")
    return number


def _window_count(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_WINDOW:
        raise ValueError(f"must be a whole number of 1 to {MAX_WINDOW}")
    return value


def _count(name: str) -> Callable[[object], int]:
    lowest = 0 if name == "cool_down_rows" else 1

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= MAX_WINDOW:
            raise ValueError(f"must be a whole number of {lowest} to {MAX_WINDOW}")
        return value

    return check


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 500:
        raise ValueError("must be a text of 1 to 500 characters")
    return value.strip()


def _when(value: object) -> str:
    if value not in WHEN:
        raise ValueError(f"must be one of {', '.join(WHEN)}")
    return str(value)


def _severity(value: object) -> str:
    if value not in SEVERITIES:
        raise ValueError(f"must be one of {', '.join(SEVERITIES)}")
    return str(value)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value
