"""How an engine is started: its command line and its environment. Pure.

No secret and no proxy setting is handed to an engine.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from furlong.config import RunConfig
from furlong.rundir import RunDir

CPU_MAX_TOTAL_TOKENS = 65536
"""KV cache of SGLang on a CPU when none is given: its own choice is most of the memory."""

_NOT_PASSED = re.compile(r"(_PROXY$|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|^PYTHONSTARTUP$)", re.IGNORECASE)


@dataclass(frozen=True)
class EnginePlace:
    """What differs from engine to engine."""

    index: int
    parent_pid: int
    port: int
    """For SGLang, which cannot take port 0."""
    port_file: Path
    """Where the CPU engine writes the port it got."""
    num_gpus: int
    """GPUs of this host. 0: a CPU run."""


def engine_command(config: RunConfig, place: EnginePlace) -> list[str]:
    """The command line of one engine."""
    if config.rollout.rollout_engine == "sglang":
        return _sglang_command(config, place)
    return _cpu_command(config, place)


def _cpu_command(config: RunConfig, place: EnginePlace) -> list[str]:
    rollout = config.rollout
    command = [sys.executable, "-m", "services.rollout.engine"]
    options = {
        "--model-path": config.model.hf_checkpoint,
        "--tokenizer-path": config.model.tokenizer or config.model.hf_checkpoint,
        "--host": config.run.host,
        "--port": "0",
        "--port-file": str(place.port_file),
        "--dtype": config.model.dtype,
        "--max-running-requests": str(rollout.engine_max_running_requests),
        "--num-threads": str(rollout.engine_num_threads),
        "--random-seed": str(config.run.seed),
        "--parent-pid": str(place.parent_pid),
        "--instance": f"engine-{place.index}",
        "--log-level": config.run.log_level,
        "--run-config": str(RunDir(Path(config.run.run_dir)).config),
    }
    if rollout.engine_max_total_tokens is not None:
        options["--max-total-tokens"] = str(rollout.engine_max_total_tokens)
    return [*command, *_flat(options), "--skip-weights"]


def _sglang_command(config: RunConfig, place: EnginePlace) -> list[str]:
    rollout = config.rollout
    leash = [sys.executable, "-m", "services.rollout.leash", str(place.parent_pid), rollout.sglang_python]
    start = [rollout.sglang_launcher] if rollout.sglang_launcher else ["-m", "sglang.launch_server"]
    options = {
        "--model-path": config.model.hf_checkpoint,
        "--tokenizer-path": config.model.tokenizer or config.model.hf_checkpoint,
        "--host": config.run.host.strip("[]"),
        "--port": str(place.port),
        "--dtype": config.model.dtype,
        "--max-running-requests": str(rollout.engine_max_running_requests),
        "--random-seed": str(config.run.seed),
        "--weight-version": "none",
    }
    max_total_tokens = rollout.engine_max_total_tokens
    per_engine = rollout.rollout_num_gpus_per_engine
    if place.num_gpus == 0:
        options["--device"] = "cpu"
        max_total_tokens = max_total_tokens or CPU_MAX_TOTAL_TOKENS
    else:
        on_gpu = config.trainer.trainer_device != "cpu"
        first = config.trainer.trainer_num_ranks if on_gpu else 0  # the trainer's ranks have the first ones
        options["--base-gpu-id"] = str((first + place.index * per_engine) % place.num_gpus)
    if per_engine > 1:
        options["--tp-size"] = str(per_engine)
    if max_total_tokens is not None:
        options["--max-total-tokens"] = str(max_total_tokens)
    return [*leash, *start, *_flat(options), *rollout.sglang_args]


def engine_environment(config: RunConfig, place: EnginePlace, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of one engine: ours without secrets and proxies, threads and downloads bounded."""
    environment = {name: value for name, value in inherited.items() if not _NOT_PASSED.search(name)}
    threads = str(config.rollout.engine_num_threads)
    environment.update(
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        PYTHONUNBUFFERED="1",
    )
    if config.rollout.rollout_engine == "sglang" and place.num_gpus == 0:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    return environment


def _flat(options: Mapping[str, str]) -> list[str]:
    return [part for option in options.items() for part in option]
