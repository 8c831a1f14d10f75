"""What is refused before any process starts; each fault with its key."""

import os
import socket
from pathlib import Path

import pytest

from furlong.config.errors import Problem
from furlong.launch import preflight
from furlong.launch.preflight import check_machine
from tests.launch.runs import read, small_run

SERVICES = ("metrics", "router", "rollout", "trainer")


def problems(path: Path, *flags: str) -> list[Problem]:
    return check_machine(read(path, *flags), SERVICES, os.environ)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_run(tmp_path)


def test_sound_run_has_no_problem(run: Path) -> None:
    assert problems(run) == []


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--hf-checkpoint", "missing"], "model.hf_checkpoint"),
        (["--tokenizer", "missing"], "model.tokenizer"),
        (["--ref-load", "missing"], "trainer.ref_load"),
        (["--prompt-data", "missing.jsonl"], "rollout.prompt_data"),
        (["--eval-prompt-data", "held_out", "missing.jsonl"], "rollout.eval_prompt_data"),
        (["--rollout-engine", "sglang", "--sglang-python", "/missing"], "rollout.sglang_python"),
        (["--alert-rules", "missing.toml"], "metrics.alert_rules"),
        (["--halt-on", "missing"], "metrics.halt_on"),
        (["--disable-alerts", "missing"], "metrics.disable_alerts"),
        (["--alert-slack-webhook-file", "missing"], "metrics.alert_slack_webhook_file"),
    ],
)
def test_missing_file_is_refused_by_its_key(run: Path, flags: list[str], key: str) -> None:
    found = problems(run, *flags)
    assert [problem.key for problem in found] == [key]
    assert "missing" in str(found[0])


def test_all_faults_are_told_at_once(run: Path) -> None:
    found = problems(run, "--hf-checkpoint", "missing", "--prompt-data", "missing", "--tail", str(run.parent))
    assert {problem.key for problem in found} == {"model.hf_checkpoint", "rollout.prompt_data", "metrics.tail"}


def test_parquet_is_refused_with_the_way_to_json_lines(run: Path) -> None:
    (run.parent / "prompts.parquet").write_bytes(b"PAR1")
    (found,) = problems(run, "--prompt-data", str(run.parent / "prompts.parquet"))
    assert found.key == "rollout.prompt_data" and "lines=True" in found.remedy


def test_empty_prompt_file_is_refused(run: Path) -> None:
    (run.parent / "prompts.jsonl").write_text("")
    assert [problem.rule for problem in problems(run)] == ["must not be empty"]


@pytest.mark.parametrize("service", ["router", "metrics"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_taken_port_is_refused(run: Path, service: str, host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        port = taken.getsockname()[1]
        found = problems(run, f"--{service}-port", str(port), "--host", host)
    assert [problem.key for problem in found] == [f"{service}.{service}_port"]
    assert str(port) in str(found[0]) and "in use" in str(found[0])


@pytest.mark.parametrize(
    ("extra", "flags"),
    [("router", []), ("tensorboard", ["--use-tensorboard"]), ("mlflow", ["--mlflow-tracking-uri", "http://h:1"])],
)
def test_missing_package_names_the_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch, extra: str, flags: list[str]
) -> None:
    monkeypatch.setattr(preflight, "NEEDED_MODULES", {extra: ("no_such_package",)})
    (found,) = problems(run, *flags)
    assert "no_such_package" in str(found) and f"pip install 'furlong-rl[{extra}]'" in str(found)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_package", "no_such_package"),
        ("raise RuntimeError('disk is on fire')", "disk is on fire"),
        ("print('[]', flush=True); import sys; sys.exit(0)", "ends the process"),
        ("import os; os._exit(0)", "exit code 0"),
        ("score = 3", "callable"),
        ("", "no attribute 'score'"),
    ],
)
def test_hook_that_does_not_import_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    (run.parent / "my_rewards.py").write_text(code)
    monkeypatch.chdir(run.parent)
    run.write_text(run.read_text().replace('rm_type = "last_number"', 'custom_rm_path = "my_rewards.score"'))
    found = problems(run)
    assert len(found) == 1 and said in str(found[0]) and "my_rewards" in str(found[0])


def test_hook_with_other_parameters_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "my_hooks.py").write_text("def log(rollout_id, samples): return False")
    monkeypatch.chdir(run.parent)
    (found,) = problems(run, "--custom-rollout-log-function-path", "my_hooks.log")
    assert "log(rollout_id, args, samples, extra, rollout_time), but is log(rollout_id, samples)" in str(found)


def test_hook_that_imports_is_accepted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "my_hooks.py").write_text("print('hello from the hook')\ndef log(*given): return False")
    monkeypatch.chdir(run.parent)
    assert problems(run, "--custom-rollout-log-function-path", "my_hooks.log") == []


def test_webhooks_are_checked_without_showing_them(run: Path) -> None:
    found = problems(run, "--alert-webhook", "example.org/secret")
    assert [problem.key for problem in found] == ["metrics.alert_webhook"] and "secret" not in str(found[0])
