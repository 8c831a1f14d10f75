"""A tiny model on disk and configurations around it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from furlong.config import RunConfig
from furlong.config.rules import resolve
from services.trainer.fsdp_backend import FsdpBackend
from services.trainer.rank_info import RankInfo
from tests.trainer.tiny_model import make_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


ConfigMaker = Callable[..., RunConfig]


@pytest.fixture
def make_config(model_dir: Path, tmp_path: Path) -> ConfigMaker:
    """A configuration with fields changed: make_config(lr=1e-3, num_rollout=4)."""

    def make(**changes: object) -> RunConfig:
        tree: dict[str, dict[str, object]] = {
            "run": {
                "run_dir": str(tmp_path / "run"),
                "num_rollout": 3,
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 4,
            },
            "model": {"hf_checkpoint": str(model_dir)},
            "trainer": {"lr": 1e-3, "update_weight_timeout_s": 10.0, "distributed_timeout_s": 20.0},
            "rollout": {"prompt_data": "unused", "rm_type": "exact_match"},
        }
        sections = {name: info.annotation for name, info in RunConfig.model_fields.items()}
        for key, value in changes.items():
            section = next(name for name, cls in sections.items() if key in cls.model_fields)  # type: ignore[union-attr]
            tree.setdefault(section, {})[key] = value
        return resolve(RunConfig.model_validate(tree))

    return make


BackendMaker = Callable[..., FsdpBackend]


@pytest.fixture
def make_backend(make_config: ConfigMaker) -> BackendMaker:
    """A backend of one rank on the CPU, with fields of the configuration changed."""

    def make(**changes: object) -> FsdpBackend:
        return FsdpBackend(make_config(**changes), RankInfo(0, 1, torch.device("cpu")))

    return make
