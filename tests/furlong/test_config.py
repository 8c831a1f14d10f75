"""From a file and flags to a resolved run, and the errors on the way."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.config import ConfigError, RunConfig, load_config, load_resolved, to_toml
from furlong.config.miles import INSTEAD

BASE = ["--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", "--rm-type", "last_number"]
KNOBS = {
    "rollout_batch_size": 6,
    "n_samples_per_prompt": 4,
    "global_batch_size": 8,
    "num_steps_per_rollout": 3,
}  # 6 x 4 = 8 x 3
SIZES = ["--rollout-batch-size", "6", "--n-samples-per-prompt", "4"]
PROFILE = ("--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "2")


def load(*flags: str, file: Path | None = None) -> RunConfig:
    return load_config(str(file) if file else None, [*BASE, *flags], prog="furlong", description="")


def refused(*flags: str, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*flags, file=file)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_flags_win_over_the_file_and_the_file_over_defaults(toml: Path) -> None:
    toml.write_text("[trainer]\nlr = 0.5\nweight_decay = 0.25\n")
    config = load(*SIZES, "--lr", "0.125", file=toml)
    assert (config.trainer.lr, config.trainer.weight_decay, config.trainer.adam_beta1) == (0.125, 0.25, 0.9)


def test_a_flag_wins_also_with_the_default_value(toml: Path) -> None:
    toml.write_text("[run]\nseed = 7\n[trainer]\nuse_kl_loss = true\n")
    config = load(*SIZES, "--seed=1234", "--no-use-kl-loss", file=toml)
    assert (config.run.seed, config.trainer.use_kl_loss) == (1234, False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[trainer]\nlearning_rte = 1\n", "trainer.learning_rte = 1: is not a known key"),
        ("[trainer]\nlrr = 1\n", "Did you mean trainer.lr?"),
        ("[rollout]\nlr = 1\n", "It belongs into the section [trainer]"),
        ("lr = 1\n", "It belongs into the section [trainer]"),
        ("[trianer]\nlr = 1\n", "Did you mean the section [trainer]?"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(toml: Path, content: str, said: str) -> None:
    toml.write_text(content)
    message = refused(*SIZES, file=toml)
    assert said in message and str(toml) in message


def test_bad_toml_names_file_and_line(toml: Path) -> None:
    toml.write_text("[trainer]\nlr = 1\nlr = = 2\n")
    message = refused(*SIZES, file=toml)
    assert str(toml) in message and "line 3" in message


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"[a]\n[a]\n"])
def test_a_file_that_cannot_be_read_is_an_error(toml: Path, content: bytes | None) -> None:
    if content is not None:
        toml.write_bytes(content)
    assert str(toml) in refused(*SIZES, file=toml)


def test_all_faults_of_a_file_are_told_at_once(toml: Path) -> None:
    toml.write_text("[trainer]\nlr = -1\nadam_beta1 = 2\n[run]\nseed = 'x'\n")
    message = refused(*SIZES, file=toml)
    assert all(key in message for key in ("trainer.lr", "trainer.adam_beta1", "run.seed"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lr", "-1"], "trainer.lr = -1.0"),
        (["--lr", "nan"], "finite"),
        (["--lr", "inf"], "finite"),
        (["--entropy-coef", "nan"], "finite"),
        (["--rollout-temperature", "0"], "rollout.rollout_temperature"),
        (["--host", "0.0.0.0"], "loopback"),
        (["--max-staleness", "1"], "run.max_staleness"),
        (["--n-samples-per-prompt", "1", "--num-steps-per-rollout", "1"], "at least 2"),
        (["--kl-loss-coef", "0.1"], "use_kl_loss"),
        (["--eval-interval", "5"], "eval-prompt-data"),
        (["--eval-prompt-data", "name"], "pairs"),
        (["--wandb-group", "a/b"], "must not contain '/'"),
        (["--custom-rm-path", "a.b"], "exactly one reward"),
        (["--profile-ranks", "0"], "has no effect without use_pytorch_profiler"),
        (["--use-pytorch-profiler"], "must be a window of rollouts"),
        ([*PROFILE, "--profile-step-end", "1"], "must be a window of rollouts"),
        ([*PROFILE, "--profile-ranks", "8"], "below the number of trainer ranks (1)"),
        (["--name", "../x"], "run.name"),
        (["--rollout-num-gpus", "2", "--rollout-num-engines", "1"], "rollout.rollout_num_gpus"),
        (["--rm-type", "math"], "rollout.rm_type = 'math': must be 'last_number' or 'exact_match'"),
    ],
)
def test_impossible_values_are_refused(flags: list[str], said: str) -> None:
    assert said in refused(*SIZES, *flags)


@pytest.mark.parametrize("given", [c for n in range(5) for c in itertools.combinations(KNOBS, n)])
def test_the_four_knobs(given: tuple[str, ...]) -> None:
    """Three of the four give the fourth; the two of the rollout mean one step; fewer are refused."""
    flags = [part for name in given for part in ("--" + name.replace("_", "-"), str(KNOBS[name]))]
    if len(given) >= 3:
        run = load(*flags).run
        assert {name: getattr(run, name) for name in KNOBS} == KNOBS
    elif set(given) == {"rollout_batch_size", "n_samples_per_prompt"}:
        run = load(*flags).run
        assert (run.global_batch_size, run.num_steps_per_rollout) == (24, 1)
    else:
        message = refused(*flags)
        assert "needs three of its four numbers" in message
        assert all("--" + n.replace("_", "-") in message for n in KNOBS if n not in given)


def test_four_knobs_that_do_not_fit_show_both_products() -> None:
    message = refused(*SIZES, "--global-batch-size", "8", "--num-steps-per-rollout", "4")
    assert "6 x 4 = 24, 8 x 4 = 32" in message


def test_a_knob_that_would_not_be_whole_is_refused() -> None:
    assert "24 is not divisible by global_batch_size = 7" in refused(*SIZES, "--global-batch-size", "7")


@pytest.mark.parametrize("flag", ["--actor-num-gpus-per-node", "--trainer-num-ranks"])
def test_miles_names_are_taken(flag: str) -> None:
    assert load(*SIZES, flag, "2").trainer.trainer_num_ranks == 2


def test_miles_number_of_devices_gives_the_engines() -> None:
    assert load(*SIZES, "--rollout-num-gpus", "3").rollout.rollout_num_engines == 3


@pytest.mark.parametrize(("flags", "ranks"), [([], ()), (["0"], (0,)), (["0", "8"], (0, 8))])
def test_profile_ranks_are_a_list(flags: list[str], ranks: tuple[int, ...]) -> None:
    given = ["--profile-ranks", *flags] if flags else []
    config = load(*SIZES, *PROFILE, *given)
    assert config.trainer.profile_ranks == ranks


def test_what_follows_from_other_fields_is_filled_in() -> None:
    config = load(*SIZES, "--name", "arith", "--rollout-temperature", "0.7", "--eps-clip", "0.3")
    assert config.run.run_dir == "runs/arith"
    assert (config.rollout.eval_temperature, config.trainer.eps_clip_high) == (0.7, 0.3)


def test_a_resolved_run_is_read_back_equal(tmp_path: Path) -> None:
    config = load(
        *SIZES, *PROFILE, "--profile-ranks", "0",
        "--rollout-num-gpus", "2", "--rollout-stop", "a\nb", 'q"', "--name", "x.y-z",
        "--eval-prompt-data", "dev", "dev.jsonl", "--host", "::1", "--lr", "1e-7",
    )  # fmt: skip
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    again = load_resolved(file)
    assert again == config and to_toml(again) == to_toml(config)


def test_no_secret_is_taken_shown_or_dumped(monkeypatch: pytest.MonkeyPatch, toml: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "SECRET123")
    assert "SECRET123" not in to_toml(load(*SIZES, "--use-wandb"))
    for flags in (["--wandb-key", "SECRET123"], ["--wandb-key=SECRET123"], ["--api-token", "SECRET123"]):
        message = refused(*SIZES, *flags)
        assert "SECRET123" not in message and "WANDB_API_KEY" in message
    toml.write_text('[metrics]\nwandb_key = "SECRET123"\n')
    message = refused(*SIZES, file=toml)
    assert "SECRET123" not in message and "wandb_key" in message


def test_fields_that_end_in_key_but_hold_none_are_shown() -> None:
    assert load(*SIZES, "--reward-key", "score", "--input-key", "q").rollout.reward_key == "score"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--rollout-temperatur", "1"],
            "--rollout-temperatur = '1': is not a flag. Did you mean --rollout-temperature?",
        ),
        (["--conifg", "run.toml"], "Did you mean --config?"),
        (["--nonsense"], "--nonsense: is not a flag. --help lists all flags."),
        (["--save", "out"], "--save = 'out': is not a flag. Every checkpoint is in --run-dir"),
        (["--tensor_model_parallel_size=2"], "= '2': is not a flag. It belongs to Megatron"),
        (["--sglang-mem-fraction-static", "0.7"], "sglang_args"),
        (["--use-kl-loss", "true"], "--use-kl-loss = 'true': takes no value. Give --use-kl-loss or --no-use-kl-loss."),
    ],
)
def test_an_unknown_flag_is_refused_with_what_to_do(flags: list[str], said: str) -> None:
    assert said in refused(*SIZES, *flags)


def test_all_unknown_flags_are_told_at_once() -> None:
    message = refused("--colocate", "--lr", "1", "--num-epoch=2")
    assert message.count("is not a flag") == 2 and "--num-rollout" in message


def test_a_file_without_its_flag_is_understood() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean --config run\.toml\?"):
        load_config(None, ["run.toml"], prog="furlong", description="")


def test_hints_for_miles_flags_name_flags_that_there_are() -> None:
    known = {f"--{f.replace('_', '-')}" for s in RunConfig().model_dump().values() for f in s}
    assert not {f"--{name}" for name in INSTEAD} & known
    said = {flag for sentence in INSTEAD.values() for flag in re.findall(r"--[a-z-]+[a-z]", sentence)}
    assert said and said <= known


def test_a_value_of_the_wrong_type_ends_like_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(*SIZES, "--lr", "abc")
    assert caught.value.code == 2 and "--lr" in capsys.readouterr().err


def test_a_reward_given_as_a_flag_takes_the_place_of_the_file_s(toml: Path) -> None:
    toml.write_text('[rollout]\nrm_type = "exact_match"\n')
    flags = ["--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", *SIZES, "--custom-rm-path", "my.score"]
    rollout = load_config(str(toml), flags, prog="furlong", description="").rollout
    assert (rollout.rm_type, rollout.custom_rm_path) == (None, "my.score")


def test_none_takes_a_value_of_the_file_away(toml: Path) -> None:
    toml.write_text("[run]\nnum_steps_per_rollout = 2\n")
    assert load(*SIZES, "--num-steps-per-rollout", "None", file=toml).run.num_steps_per_rollout == 1


def test_sizes_that_cannot_be_and_broken_rules_are_told_at_once() -> None:
    message = refused("--kl-loss-coef", "0.1")
    assert "needs three of its four numbers" in message and "use_kl_loss" in message


def test_help_shows_words_and_types_instead_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--help")
    shown = capsys.readouterr().out
    assert "--rm-type {last_number,exact_match}" in shown and "--rollout-batch-size INT" in shown
    assert "{None}" not in shown and "(default: None)" not in shown


def test_a_run_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        load(*SIZES).run.seed = 3  # type: ignore[misc]


def test_reading_a_config_imports_no_torch_and_no_vendor() -> None:
    program = "import sys, furlong.config; print([m for m in ('torch', 'wandb', 'tyro', 'grpc') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
