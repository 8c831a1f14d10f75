"""The tensor files of a checkpoint: the model as a transformers folder `hf/`, moments and generator beside it.

Reads and writes one folder; knows nothing of which checkpoint is the newest. The only file that uses safetensors.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.trainer.backend import TrainerState

HF_FOLDER = "hf"
WEIGHTS = f"{HF_FOLDER}/model.safetensors"
MOMENTS = "optimizer.safetensors"
COUNTERS = "trainer.json"
RNG_KEY = "rng"


class LazyTensors:
    """Tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt")  # Any: safetensors has no types

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)


@dataclass(frozen=True)
class SavedState:
    """A TrainerState on disk."""

    tensors: LazyTensors
    moments: LazyTensors
    optimizer_steps: int
    rng: torch.Tensor
    train_step: int
    skipped_steps: int


def write_state(folder: Path, state: TrainerState) -> None:
    """Write the state's files into a folder. Raises OSError when the disk is full."""
    (folder / HF_FOLDER).mkdir()
    _save(dict(state.tensors), folder / WEIGHTS)
    _save({**state.moments, RNG_KEY: state.rng}, folder / MOMENTS)
    counters = {
        "optimizer_steps": state.optimizer_steps,
        "train_step": state.train_step,
        "skipped_steps": state.skipped_steps,
    }
    (folder / COUNTERS).write_text(json.dumps(counters))


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Raises OSError: safetensors hides a full disk in an error of its own."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except OSError:
        raise
    except Exception as error:  # safetensors' own class, which holds the system's error as text
        raise OSError(f"{path}: {error}") from error
    path.chmod(0o644)  # as every other file of a run


def read_state(folder: Path) -> SavedState:
    """Open the state's files; tensors are read one by one."""
    counters = json.loads((folder / COUNTERS).read_text())
    moments = LazyTensors(folder / MOMENTS)
    return SavedState(
        tensors=LazyTensors(folder / WEIGHTS),
        moments=moments,
        optimizer_steps=counters["optimizer_steps"],
        rng=moments[RNG_KEY],
        train_step=counters["train_step"],
        skipped_steps=counters["skipped_steps"],
    )
