"""How torch is set before any tensor is made: threads, determinism, seed."""

import os

import torch

from furlong.config import RunConfig


def set_up_torch(config: RunConfig) -> None:
    """Once, before the model is loaded. Nothing random is left to training itself: seeds derive from ids."""
    # cuBLAS is deterministic only with a fixed workspace, and reads this variable when it starts
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(config.trainer.trainer_num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(config.run.seed)
