"""The engine's command line.

It owns the flags, their names (SGLang's where it has them) and defaults. It must never import torch: `--help` answers
at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineOptions:
    """What the engine was started with."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    host: str
    port: int
    port_file: Path | None
    dtype: str
    max_running_requests: int
    max_queued_requests: int
    max_total_tokens: int | None
    context_length: int | None
    random_seed: int
    weight_version: str
    skip_weights: bool
    num_threads: int
    enable_metrics: bool
    log_level: str
    drain_timeout_s: float
    parent_pid: int | None
    instance: str
    run_config: Path | None


def parse_options(argv: Sequence[str] | None = None) -> EngineOptions:
    """Read the command line; exits with 2 and a reason if it is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("max_running_requests", "max_queued_requests", "num_threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    for name in ("max_total_tokens", "context_length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {value}")
    if not 0 <= args.port <= 65535:
        parser.error(f"--port must be in 0..65535, got {args.port}")
    args.served_model_name = args.served_model_name or args.model_path
    args.tokenizer_path = args.tokenizer_path or args.model_path
    return EngineOptions(**vars(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.rollout.engine",
        description="Generate with a language model on the CPU, over SGLang's HTTP API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", required=True, help="checkpoint folder (config.json, *.safetensors, tokenizer)")
    add("--tokenizer-path", help="folder of the tokenizer; the checkpoint's if not given")
    add("--served-model-name", help="name in /v1/models; the model path if not given")
    add("--host", default="127.0.0.1", help="address to bind")
    add("--port", type=int, default=30000, help="port to bind; 0 lets the system choose")
    add("--port-file", type=Path, help="file that gets the bound port when the engine listens")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the checkpoint's")
    add("--max-running-requests", type=int, default=64, help="samples that run at once")
    add("--max-queued-requests", type=int, default=4096, help="samples that may wait; more get a 503")
    add("--max-total-tokens", type=int, help="positions reserved by running samples; half the memory if not given")
    add("--context-length", type=int, help="longest prompt plus answer; the model's if not given")
    add("--random-seed", type=int, default=42, help="seed of requests that bring none")
    add("--weight-version", default="default", help="version of the weights loaded at start")
    add("--skip-weights", action="store_true", help="load none: refuse to generate until a first complete update")
    add("--num-threads", type=int, default=1, help="threads of one operation")
    add("--enable-metrics", action="store_true", help="serve /metrics and add timings to meta_info")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="least level logged")
    add("--drain-timeout-s", type=float, default=30.0, help="on SIGTERM, time for running samples to end")
    add("--parent-pid", type=int, help="end at once when this parent process does")
    add("--instance", default="engine", help="name of this process in its logs")
    add("--run-config", type=Path, help="config.toml of a Furlong run: log into its folder and to its metrics service")
    return parser
