"""What of a run must be the same for its checkpoint to fit, and what may change with a warning. Pure."""

import hashlib
from collections.abc import Mapping, Sequence

from furlong.config import RunConfig
from services.trainer.backend import TensorLayout


def fingerprint_of(config: RunConfig, layouts: Sequence[TensorLayout]) -> Mapping[str, str]:
    """A difference here makes a resume wrong: it is refused."""
    shapes = "\n".join(f"{tensor.name} {list(tensor.shape)}" for tensor in layouts)
    return {
        "model.dtype": config.model.dtype,
        "model tensors": f"{len(layouts)} tensors, digest {hashlib.blake2b(shapes.encode()).hexdigest()[:16]}",
    }


def advisory_of(config: RunConfig) -> Mapping[str, str]:
    """A difference here makes another run than an unbroken one would be: it is told."""
    run, trainer = config.run, config.trainer
    return {
        "run.seed": str(run.seed),
        "run.rollout_batch_size": str(run.rollout_batch_size),
        "run.n_samples_per_prompt": str(run.n_samples_per_prompt),
        "run.num_steps_per_rollout": str(run.num_steps_per_rollout),
        "trainer.trainer_num_ranks": str(trainer.trainer_num_ranks),
        "model.hf_checkpoint": config.model.hf_checkpoint,
    }
