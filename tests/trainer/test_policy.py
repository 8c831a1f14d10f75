"""A model folder that is not whole is refused in words: never a traceback, never weights made of random numbers."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from furlong.config import ConfigError
from services.trainer.policy import load_lm


def cut(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:1000])


def rewritten(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(weights: Path) -> None:
        tensors = load_file(weights)
        change(tensors)
        save_file(tensors, weights, metadata={"format": "pt"})

    return rewrite


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "must be a transformers causal LM"),
        (Path.unlink, "must be a transformers causal LM"),
        (rewritten(lambda tensors: tensors.pop(NORM)), f"lacks 1 of the model's weights.*{NORM}"),
        (rewritten(lambda tensors: tensors.update({NORM: torch.ones(3)})), NORM),
    ],
)
def test_broken_model_folder_is_refused(
    tmp_path: Path, model_dir: Path, damage: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    damage(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=said) as told:
        load_lm(str(folder), key="model.hf_checkpoint")
    assert str(told.value).startswith(f"model.hf_checkpoint = '{folder}'")


def test_tied_head_is_not_missing() -> None:
    assert load_lm("examples/arithmetic/base", key="model.hf_checkpoint").training is False
