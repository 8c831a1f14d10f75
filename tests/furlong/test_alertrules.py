"""Rules of a run: the file's faults are told with rule, key, value and remedy; names are checked."""

from pathlib import Path

import pytest

from furlong.alertrules import BUILT_IN, check_alerts, choose_rules
from furlong.config import ConfigError
from furlong.config.sections import MetricsSection


def written(folder: Path, text: str) -> str:
    path = folder / "rules.toml"
    path.write_text(text)
    return str(path)


def problems(folder: Path, text: str) -> str:
    return "\n".join(map(str, check_alerts(MetricsSection(alert_rules=written(folder, text)))))


def test_a_rule_of_ones_own_has_what_the_file_says(tmp_path: Path) -> None:
    text = """
    [rules.reward_low]
    key = "rollout/raw_reward"
    when = "below"
    value = 0.1
    rows = 5
    resolve_rows = 2
    severity = "critical"
    remedy = "Look at the reward function."
    run = "arith-*"
    diverged = true
    """
    rule = choose_rules(MetricsSection(alert_rules=written(tmp_path, text))).rules["reward_low"]
    assert (rule.kind, rule.keys, rule.numbers) == ("below", ("rollout/raw_reward",), {"limit": 0.1})
    assert (rule.rows, rule.resolve_rows, rule.severity, rule.run) == (5, 2, "critical", "arith-*")
    assert rule.remedy == "Look at the reward function." and rule.diverged


def test_a_built_in_rule_takes_other_numbers_and_keeps_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path, "[rules.loss_spike]\nsigmas = 20\nrows = 4\n[rules.repetition]\nenabled = false")
    chosen = choose_rules(MetricsSection(alert_rules=path, disable_alerts=("kl_jump",)))
    spike, default = chosen.rules["loss_spike"], BUILT_IN["loss_spike"]
    assert spike.numbers == {**default.numbers, "sigmas": 20.0} and spike.rows == 4
    assert spike.remedy == default.remedy
    assert {"repetition", "kl_jump"} & set(chosen.rules) == set()


OWN = '[rules.mine]\nkey = "a/b"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[rules.mine", "must be TOML"),
        ("x = 1", "rules.toml: x = 1: is not known here"),
        ("rules = 3", "must be a table of rules"),
        ("[rules]\nloss_spike = 3", "rules.loss_spike = 3: must be a table"),
        ("[rules.loss_spkie]\nsigmas = 3", "is no built-in rule, and says neither key nor when. Built-in are loss_non"),
        ("[rules.loss_spike]\nsigma = 3", "rules.loss_spike.sigma = 3: is not known here. loss_spike takes window"),
        ('[rules.loss_spike]\nsigmas = "many"', "rules.loss_spike.sigmas = 'many': must be a finite number"),
        ("[rules.loss_spike]\nsigmas = nan", "must be a finite number"),
        ("[rules.loss_spike]\nwindow = 100000", "rules.loss_spike.window = 100000: must be a whole number of 1 to"),
        ("[rules.loss_spike]\nrows = 0", "rules.loss_spike.rows = 0: must be a whole number of 1 to"),
        ("[rules.service_gone]\nrows = 2", "rules.service_gone.rows = 2: is not known here"),
        ('[rules.loss_spike]\nseverity = "fatal"', "must be one of warning, critical"),
        ('[rules."9x"]\nkey = "a"\nwhen = "changes"', "must be a name of letters"),
        ('[rules.mine]\nwhen = "above"\nvalue = 1', "rules.mine key = '': must be given. For example"),
        (OWN, "rules.mine.when = '': must be given. One of above, below"),
        (OWN + 'when = "over"', "rules.mine.when = 'over': must be one of above"),
        (OWN + 'when = "above"', "rules.mine.value = '': must be given. when = \"above\" needs it."),
        (OWN + 'when = "above"\nvalue = true', "rules.mine.value = True: must be a finite number"),
        (OWN + 'when = "outside"\nlow = 2\nhigh = 1', "rules.mine.low = 2: must be below high (1)"),
        (OWN + 'when = "changes"\nvalue = 2', "rules.mine.value = 2: has no meaning with when"),
        (OWN + 'when = "no_row_for"\nseconds = 0', "rules.mine.seconds = 0: must be above 0"),
        (OWN + 'when = "above"\nvalue = 1\nlevel = 2', "rules.mine.level = 2: is not known here"),
        (OWN + 'when = "above"\nvalue = 1\nremedy = ""', "rules.mine.remedy = '': must be a text"),
    ],
)
def test_every_fault_of_a_file_is_told_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    told = problems(tmp_path, text)
    assert expected in told and "rules.toml" in told


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    told = problems(tmp_path, OWN + 'when = "above"\nvalue = "x"\nrows = 0\n[rules.loss_spike]\nsigma = 1')
    assert len(told.splitlines()) == 3


def test_a_file_that_cannot_be_read_is_told() -> None:
    told = str(check_alerts(MetricsSection(alert_rules="nowhere.toml"))[0])
    assert "metrics.alert_rules = 'nowhere.toml': must be a file that can be read" in told


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_bytes(b"\xff\xfe\x00")
    assert "must be TOML" in str(check_alerts(MetricsSection(alert_rules=str(tmp_path / "rules.toml")))[0])


def test_unknown_names_are_refused_with_those_that_there_are(tmp_path: Path) -> None:
    metrics = MetricsSection(halt_on=("loss_spkie",), disable_alerts=("nothing",))
    told = "\n".join(map(str, check_alerts(metrics)))
    assert "metrics.halt_on = 'loss_spkie': must be the name of an alert rule. There are loss_nonfinite" in told
    assert "metrics.disable_alerts = 'nothing'" in told
    with pytest.raises(ConfigError):
        choose_rules(metrics)


def test_a_rule_of_the_file_may_halt_and_a_disabled_one_may_not(tmp_path: Path) -> None:
    path = written(tmp_path, OWN + 'when = "changes"')
    assert choose_rules(MetricsSection(alert_rules=path, halt_on=("mine",))).halt_on == {"mine"}
    told = check_alerts(MetricsSection(halt_on=("kl_jump",), disable_alerts=("kl_jump",)))
    assert "is disabled, so it would never halt the run" in str(told[0])


def test_remedies_name_only_flags_that_there_are() -> None:
    import re

    from furlong.config import RunConfig

    sections = [getattr(RunConfig(), name) for name in RunConfig.model_fields]
    flags = {name.replace("_", "-") for section in sections for name in type(section).model_fields}
    said = {flag for rule in BUILT_IN.values() for flag in re.findall(r"--([a-z-]+[a-z])", rule.remedy)}
    assert said <= flags
