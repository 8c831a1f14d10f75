"""Reads the tensors of a Hugging Face checkpoint folder, one file at a time.

It owns the safetensors file format as far as the engine needs it. It must never unpickle: a .bin checkpoint is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor


class CheckpointError(ValueError):
    """The folder holds no checkpoint that can be read."""


def checkpoint_files(model_path: Path) -> list[Path]:
    """Return the safetensors files of a folder, in order."""
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"model_path must hold *.safetensors files, got {str(model_path)!r}")
    return files


def iterate_tensors(model_path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor in the folder."""
    from safetensors import SafetensorError, safe_open

    for path in checkpoint_files(model_path):
        try:
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - a reader is not a mapping
                    yield name, reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
