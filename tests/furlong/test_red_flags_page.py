"""The page about red flags says what the rules are."""

from pathlib import Path

import pytest

from furlong.alertrules import BUILT_IN, Rule, check_alerts
from furlong.config.sections import MetricsSection

PAGE = (Path(__file__).parents[2] / "docs/red-flags.md").read_text()


@pytest.mark.parametrize("rule", BUILT_IN.values(), ids=lambda rule: rule.name)
def test_the_page_has_the_rule_with_its_meaning_numbers_and_severity(rule: Rule) -> None:
    star = " *" if rule.diverged else ""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{rule.name}`{star} |"))
    assert rule.meaning in line and line.endswith(f"| {rule.severity} |")
    assert all(f"`{name}` {number:g}" in line for name, number in rule.numbers.items())


def test_the_page_has_no_other_rule() -> None:
    rules = [line for line in PAGE.partition("## The rules")[2].partition("## ")[0].splitlines() if line[:3] == "| `"]
    assert len(rules) == len(BUILT_IN)


def test_the_pages_own_rules_file_is_sound(tmp_path: Path) -> None:
    text = PAGE.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "rules.toml").write_text(text)
    told = "\n".join(map(str, check_alerts(MetricsSection(alert_rules=str(tmp_path / "rules.toml")))))
    assert told == ""
