"""Rollout with SGLang itself, where tests/sglang_environment.py finds it."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from furlong import addresses
from furlong.config import RunConfig, to_toml
from tests.processes import left_after
from tests.rollout.engine.tiny_model import make_checkpoint
from tests.rollout.trainer_side import TrainerSide, weights_of
from tests.rollout.world import make_config, rollout_of, router_of, write_lines
from tests.sglang_environment import MISSING, find_sglang

SGLANG = find_sglang()
START_LIMIT_S = 300.0
"""SGLang takes 20 CPU seconds to start, on a machine that may be busy."""
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(2 * START_LIMIT_S),
    pytest.mark.skipif(SGLANG is None, reason=MISSING),
]


def sglang_config(root: Path, kind: str, **rollout: object) -> RunConfig:
    model = make_checkpoint(root / "checkpoint", seed=1, kind=kind)
    assert SGLANG is not None
    engine = {"sglang_python": SGLANG.python, "sglang_launcher": SGLANG.launcher}
    fields = {**engine, "engine_max_total_tokens": 4096, **rollout}
    run = {"start_timeout_s": START_LIMIT_S, "drain_budget_s": 15.0}
    config = make_config(root, run=run, rollout_max_response_len=12, **fields)  # type: ignore[arg-type]
    write_lines(Path(config.rollout.prompt_data), [{"prompt": f"{i}+{i}=", "label": str(i)} for i in range(9)])
    return config.model_copy(update={"model": config.model.model_copy(update={"hf_checkpoint": str(model)})})


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
async def test_sglang_serves_what_was_sent(tmp_path: Path, kind: str) -> None:
    config = sglang_config(tmp_path, kind)
    async with router_of(config), rollout_of(config) as w:
        entry = addresses.find(w.run_dir, "rollout")
        assert entry is not None
        assert entry.grpc is not None
        trainer = TrainerSide(entry.grpc)
        await w.restore()
        for version in range(3):
            weights = weights_of(Path(config.model.hf_checkpoint), noise=0.02 * version)
            committed = await asyncio.to_thread(trainer.publish, weights, version)
            assert committed.verification == "sampled"
            assert [e.policy_version for e in committed.engines] == [version]
            groups, summary = await w.batch(version)
            assert summary.num_samples == 8
            versions = {span.policy_version for g in groups for s in g.samples for span in s.policy_versions}
            assert versions == {version}
        trainer.close()


def test_sglang_dies_with_a_killed_rollout_service(tmp_path: Path) -> None:
    config = sglang_config(tmp_path, "qwen3")
    (tmp_path / "config.toml").write_text(to_toml(config))
    program = (
        "import sys; from pathlib import Path; from furlong.config import load_resolved;"
        "from services.rollout.main import main;"
        "sys.exit(main(load_resolved(Path(sys.argv[1])), rank=0, foreground=False))"
    )
    service = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "config.toml")])
    try:
        output = tmp_path / "run/logs/engine-0.out"
        deadline = time.monotonic() + START_LIMIT_S
        while not (output.exists() and "fired up" in output.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        family = psutil.Process(service.pid).children(recursive=True)
        assert len(family) >= 3
    finally:
        service.send_signal(signal.SIGKILL)
        service.wait(10)
    assert left_after(family, within_s=10) == []
