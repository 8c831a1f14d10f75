"""Puts the trainer's files into a checkpoint folder: tensors, and what makes hf/ a folder that transformers loads."""

from collections.abc import Callable
from pathlib import Path

from furlong.config.sections import ModelSection
from services.trainer.backend import TrainerState
from services.trainer.checkpoint_tensors import HF_FOLDER, write_state
from services.trainer.policy import save_hf_files


def checkpoint_writer(state: TrainerState, model: ModelSection) -> Callable[[Path], None]:
    """A function that writes the state into the folder it is given."""

    def write(folder: Path) -> None:
        write_state(folder, state)
        save_hf_files(model.hf_checkpoint, model.tokenizer, folder / HF_FOLDER)

    return write
