"""Puts the parts together: model, weights, scheduler, tokenizer, and what the endpoints need of them.

It owns the order of starting them. Importing it imports torch, so the command line does that last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog
import torch

from services.rollout.engine.architecture import ModelConfig, load_config
from services.rollout.engine.collector import Collector
from services.rollout.engine.group import GroupRegistry
from services.rollout.engine.kv_cache import KVCache
from services.rollout.engine.model import CausalModel
from services.rollout.engine.options import EngineOptions
from services.rollout.engine.requests import ModelLimits, RequestReader
from services.rollout.engine.results import Results
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.engine.tokenizer import Tokenizer
from services.rollout.engine.weights import WeightState

log = structlog.get_logger()
MEMORY_SHARE = 0.5
SGLANG_VERSION = "0.5.23"


@dataclass
class Engine:
    """A loaded engine. `model_path` follows updates from disk."""

    options: EngineOptions
    config: ModelConfig
    model: CausalModel
    weights: WeightState
    scheduler: Scheduler
    collector: Collector
    reader: RequestReader
    results: Results
    tokenizer: Tokenizer
    limits: ModelLimits
    groups: GroupRegistry
    served_model_name: str
    model_path: str
    started: float
    draining: bool = False


def build_engine(options: EngineOptions, *, on_crash: Callable[[BaseException], None]) -> Engine:
    """Load everything; ValueError or UpdateError if the checkpoint cannot be served."""
    torch.set_num_threads(options.num_threads)
    path = Path(options.model_path)
    config = load_config(path)
    dtype_name = config.dtype if options.dtype == "auto" else options.dtype
    dtype = torch.bfloat16 if dtype_name == "bfloat16" else torch.float32
    context = min(options.context_length or config.max_positions, config.max_positions)
    tokenizer = Tokenizer(options.tokenizer_path)
    with torch.inference_mode():
        model = CausalModel(config, dtype=dtype, num_slots=options.max_running_requests, max_positions=context)
    weights = WeightState(model.parameters, version=options.weight_version)
    if not options.skip_weights:
        weights.load_folder(path, version=options.weight_version)
    limits = ModelLimits(
        vocab_size=config.vocab_size,
        context_length=context,
        max_total_tokens=_total_tokens(options, config, context),
        eos_token_ids=frozenset((*config.eos_token_ids, *tokenizer.eos_token_ids)),
        random_seed=options.random_seed,
    )
    collector = Collector()
    scheduler = Scheduler(
        model,
        weights,
        tokenizer,
        limits=Limits(
            max_running=options.max_running_requests,
            max_queued=options.max_queued_requests,
            max_total_tokens=limits.max_total_tokens,
        ),
        deliver=collector.deliver,
        on_crash=on_crash,
    )
    _log_loaded(model, limits, dtype_name)
    return Engine(
        options=options,
        config=config,
        model=model,
        weights=weights,
        scheduler=scheduler,
        collector=collector,
        reader=RequestReader(tokenizer, limits),
        results=Results(tokenizer, lambda: weights.version, with_timings=options.enable_metrics),
        tokenizer=tokenizer,
        limits=limits,
        groups=GroupRegistry(),
        served_model_name=options.served_model_name,
        model_path=options.model_path,
        started=time.time(),
    )


def _total_tokens(options: EngineOptions, config: ModelConfig, context: int) -> int:
    most = options.max_running_requests * context
    if options.max_total_tokens is not None:
        return min(options.max_total_tokens, most)
    memory = int(psutil.virtual_memory().available * MEMORY_SHARE)
    return max(context, min(most, memory // KVCache.bytes_per_token(config)))


def _log_loaded(model: CausalModel, limits: ModelLimits, dtype: str) -> None:
    log.info(
        "engine_loaded",
        architecture=model.config.architecture,
        dtype=dtype,
        weights_bytes=model.parameters.size_bytes(),
        row_tile=model.gemm.tile,
        context_length=limits.context_length,
        max_total_tokens=limits.max_total_tokens,
    )
