"""Which alert rules a run has: the built-in ones and those of a TOML file. Shared by all who must know their names."""

from furlong.alertrules.builtin import BUILT_IN
from furlong.alertrules.choice import check_alerts, choose_rules
from furlong.alertrules.rule import Rule

__all__ = ["BUILT_IN", "Rule", "check_alerts", "choose_rules"]
