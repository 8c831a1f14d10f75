"""The whole loop with the real SGLang as the engine: every version's weights arrive in it, and it ends with the run."""

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from furlong.launch.checkpoints import newest_checkpoint
from furlong.process import ExitCode
from furlong.rundir import RunDir
from tests.sglang_environment import MISSING, find_sglang
from tests.system.conftest import Start
from tests.system.real_runs import Up, values

SGLANG = find_sglang()
START_LIMIT_S = 300.0
"""SGLang takes 20 CPU seconds to start, on a machine that may be busy."""
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(2 * START_LIMIT_S),
    pytest.mark.skipif(SGLANG is None, reason=MISSING),
]


def flags() -> list[str]:
    assert SGLANG is not None
    kept = "--custom-eval-rollout-log-function-path=tests.system.eval_samples.keep"
    limits = ["--engine-max-total-tokens=4096", f"--start-timeout-s={START_LIMIT_S:g}"]
    return [*SGLANG.flags, *limits, "--dtype=float32", "--eval-temperature=1.0", kept]


@pytest.fixture(scope="module")
def sglang_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """The small run with SGLang, ended when the test gets it."""
    up = Up(tmp_path_factory.mktemp("sglang"), *flags())
    try:
        up.wait_for("iter 1/4", limit_s=START_LIMIT_S)
        up.end()
        yield up
    finally:
        up.kill()


def test_it_ends_done_and_sglang_with_all_its_processes_too(sglang_run: Up) -> None:
    assert sglang_run.process.returncode == ExitCode.DONE, sglang_run.told()
    assert len(sglang_run.seen) >= 7  # four services, and SGLang's server, scheduler and detokenizer
    assert any("sglang::scheduler" in line for line in sglang_run.command_lines)
    assert sglang_run.left_running(within_s=2) == []
    assert "crashed" not in engine_output(sglang_run.run_dir)


def test_trainer_and_sglang_agree_before_and_after_every_update(sglang_run: Up) -> None:
    steps = [row for (axis, _), row in values(sglang_run.run_dir).items() if axis == "train/step"]
    differences = [float(row["train/train_rollout_logprob_abs_diff"]) for row in steps]
    print("train/train_rollout_logprob_abs_diff", differences)
    assert len(differences) == 8 and max(differences) < 1e-3


def test_every_version_was_sent_over_gloo_and_sampled_from(sglang_run: Up) -> None:
    found = values(sglang_run.run_dir)
    for rollout_id in range(4):
        row = found["rollout/step", rollout_id]
        assert row["rollout/weight_version/min"] == row["rollout/weight_version/max"] == rollout_id
        assert {"rollout/raw_reward", "rollout/advantages", "rollout/staleness/max"} <= row.keys()
    told = engine_output(sglang_run.run_dir)
    assert "backend=gloo" in told
    assert told.count("POST /update_weights_from_distributed") == told.count("Weight version changed") == 5


def test_rows_of_rewards_and_evaluations_are_there(sglang_run: Up) -> None:
    found = values(sglang_run.run_dir)
    assert sorted(step for axis, step in found if axis == "eval/step") == [-1, 1, 3]
    for step in (-1, 1, 3):
        assert 0 <= float(found["eval/step", step]["eval/held_out"]) <= 1
    for rollout_id in range(4):
        assert 0 <= float(found["rollout/step", rollout_id]["rollout/raw_reward"]) <= 1


def test_after_the_last_update_sglang_scores_as_transformers_does_with_the_checkpoint(sglang_run: Up) -> None:
    """And not as the weights before it do, so that equal scores mean that the last update arrived."""
    samples = json.loads((sglang_run.run_dir.root / "eval_samples_3.json").read_text())
    assert {version for sample in samples for version in sample["versions"]} == {"4"}
    last = newest_checkpoint(sglang_run.run_dir)
    assert last is not None and last.rollout_id == 3
    difference = largest_difference(samples, last.path / "hf")
    before = largest_difference(samples, last.path.with_name("rollout_000002") / "hf")
    print("last checkpoint", difference, "the one before", before)
    assert difference < 1e-3 < 10e-3 < before


def test_killed_up_takes_sglang_with_it(start: Start) -> None:
    up = start(*flags()).wait_for("iter 1/4", limit_s=START_LIMIT_S)
    up.send(signal.SIGKILL).end()
    assert len(up.seen) >= 7
    assert up.left_running(within_s=10) == []


def engine_output(run_dir: RunDir) -> str:
    return run_dir.log("engine-0").with_suffix(".out").read_text(errors="replace")


def largest_difference(samples: list[dict[str, Any]], model_path: Path) -> float:
    """Between the engine's log-probs of what it sampled and transformers' with a model folder."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    largest = 0.0
    for sample in samples:
        tokens, count = torch.tensor(sample["tokens"]), sample["response_length"]
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)  # [time - 1, vocabulary]
        scored = log_probs.gather(1, tokens[1:, None])[-count:, 0].tolist()
        assert len(scored) == len(sample["log_probs"]) > 0 and all(map(math.isfinite, sample["log_probs"]))
        largest = max(largest, *(abs(a - b) for a, b in zip(scored, sample["log_probs"], strict=True)))
    return largest
