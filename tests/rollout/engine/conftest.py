"""One engine process for the tests that leave it as they found it, and checkpoints to start others from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.engine.engine_process import EngineProcess
from tests.rollout.engine.tiny_model import make_checkpoint

CAPTURES = Path(__file__).parent / "captures"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), seed=1)


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3-other"), seed=2)


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[EngineProcess]:
    flags = ("--enable-metrics", "--weight-version", "v0", "--served-model-name", "tiny")
    engine = EngineProcess(tmp_path_factory.mktemp("engine"), checkpoint, *flags)
    yield engine
    assert engine.stop() == 0


@pytest.fixture
def engine(shared_engine: EngineProcess, checkpoint: Path) -> Iterator[EngineProcess]:
    """The shared engine, put back to its first state afterwards."""
    yield shared_engine
    shared_engine.post("/slow_down", {"forward_sleep_time": None})
    shared_engine.post("/abort_request", {"abort_all": True})
    shared_engine.post("/continue_generation", {})
    info = shared_engine.get("/model_info").json
    if info["weight_version"] != "v0" or not info["weights_valid"]:
        body = {"model_path": str(checkpoint), "weight_version": "v0"}
        shared_engine.post("/begin_weight_update", {"force": True})
        shared_engine.post("/end_weight_update", {"abort": True})
        assert shared_engine.post("/update_weights_from_disk", body).status == 200


def captures(name: str) -> dict[str, dict[str, Any]]:
    return json.loads((CAPTURES / f"{name}.json").read_text())
