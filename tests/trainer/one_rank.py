"""A sharded backend in this process: a default group of one rank, gone again afterwards."""

import torch
from torch.distributed import HashStore, destroy_process_group, init_process_group

from furlong import records
from furlong.config import RunConfig
from services.trainer.batch import Batch
from services.trainer.fsdp_backend import FsdpBackend
from services.trainer.rank_info import RankInfo


def run_one_rank(config: RunConfig, batch: Batch) -> tuple[dict[str, float | None], torch.dtype]:
    """(train/ values of the first step, dtype of the master weights)."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        backend = FsdpBackend(config, RankInfo(0, 1, torch.device("cpu")))
        steps = backend.train(batch).steps
        dtype = next(iter(backend._named.values())).dtype
    finally:
        destroy_process_group()
    return {name: records.reduce_value(value) for name, value in steps[0].values.items()}, dtype
