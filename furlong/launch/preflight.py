"""What can be refused before any process starts: packages, folders, files, ports, hooks. Reads; changes nothing."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from furlong.alertrules import check_alerts
from furlong.alertrules.webhook_urls import check_webhooks
from furlong.config import RunConfig
from furlong.config.destinations import tail_problems
from furlong.config.errors import Problem
from furlong.config.routerrules import router_host
from furlong.launch.routerfiles import bad_router_files

# What a service cannot start without; the extra of the distribution has the service's name.
NEEDED_MODULES: Mapping[str, tuple[str, ...]] = {
    "metrics": ("fastapi", "uvicorn"),
    "router": ("fastapi", "uvicorn", "aiohttp"),
    "rollout": ("torch", "transformers", "aiohttp", "jinja2"),
    "trainer": ("torch", "transformers", "safetensors"),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboardX",),
    "mlflow": ("mlflow",),
}
HOOK_KEYS = ("custom_rm_path", "custom_rollout_log_function_path", "custom_eval_rollout_log_function_path")


def check_machine(config: RunConfig, services: Iterable[str], environment: Mapping[str, str]) -> list[Problem]:
    """Everything about this machine that the run cannot work with, all at once.

    services: the ones that will be started here.
    environment: what hooks are imported under.
    """
    services = list(services)
    problems = [*missing_packages(config, services), *_missing_files(config), *_bad_addresses(config, services)]
    problems += [*check_alerts(config.metrics), *bad_router_files(config)]
    if "metrics" in services:
        problems += tail_problems(config.metrics.tail)
        problems += check_webhooks(config.metrics.alert_webhook, config.metrics.alert_slack_webhook_file)
    if not problems:  # a hook's import may need any of the above
        problems += bad_hooks(config, services, environment)
    return problems


def missing_packages(config: RunConfig, services: Iterable[str]) -> list[Problem]:
    """Extras of the distribution that are not installed here."""
    extras = list(services)
    if "metrics" in extras:
        metrics = config.metrics
        wanted = {
            "wandb": metrics.use_wandb,
            "tensorboard": metrics.use_tensorboard,
            "mlflow": metrics.mlflow_tracking_uri,
        }
        extras += [extra for extra, is_wanted in wanted.items() if is_wanted]
    problems = []
    for extra in extras:
        missing = [name for name in NEEDED_MODULES.get(extra, ()) if importlib.util.find_spec(name) is None]
        if missing:
            rule = f"needs what is not installed in {sys.prefix}: {', '.join(missing)}"
            problems.append(Problem("install", extra, rule, f"Run: pip install 'furlong-rl[{extra}]'."))
    return problems


def _missing_files(config: RunConfig) -> Iterator[Problem]:
    model, rollout = config.model, config.rollout
    yield from _missing_in("model.hf_checkpoint", model.hf_checkpoint, "config.json", "--hf-checkpoint")
    tokenizer_key = "model.tokenizer" if model.tokenizer else "model.hf_checkpoint"
    if model.tokenizer or Path(model.hf_checkpoint, "config.json").is_file():
        folder = model.tokenizer or model.hf_checkpoint
        yield from _missing_in(tokenizer_key, folder, "tokenizer.json", "--tokenizer")
    if config.trainer.ref_load:
        yield from _missing_in("trainer.ref_load", config.trainer.ref_load, "config.json", "--ref-load")
    yield from _bad_data("rollout.prompt_data", rollout.prompt_data)
    for file in rollout.eval_prompt_data[1::2]:
        yield from _bad_data("rollout.eval_prompt_data", file)
    if rollout.rollout_engine == "sglang":
        if not os.access(rollout.sglang_python, os.X_OK):
            yield Problem("rollout.sglang_python", rollout.sglang_python, "must be a program that can be run")
        if rollout.sglang_launcher:
            yield from _unreadable("rollout.sglang_launcher", rollout.sglang_launcher)


def _missing_in(key: str, folder: str, file: str, flag: str) -> Iterator[Problem]:
    if not Path(folder).is_dir():
        remedy = f"Give {flag} a folder; a model of the Hugging Face hub comes by `hf download NAME --local-dir DIR`."
        yield Problem(key, folder, f"must be a folder, seen from {Path.cwd()}", remedy)
    elif not Path(folder, file).is_file():
        yield Problem(key, folder, f"must hold {file}", f"Give {flag} a folder that a model was saved to.")


def _bad_data(key: str, file: str) -> Iterator[Problem]:
    if Path(file).suffix == ".parquet":
        remedy = "With pandas: read_parquet(FILE).to_json(OTHER, orient='records', lines=True)."
        yield Problem(key, file, "must be JSON lines, not parquet", remedy)
    else:
        yield from _unreadable(key, file)


def _unreadable(key: str, file: str) -> Iterator[Problem]:
    path = Path(file)
    if not path.is_file():
        remedy = "Paths are relative to the folder that the command runs in."
        yield Problem(key, file, f"must be a file, seen from {Path.cwd()}", remedy)
        return
    try:
        with path.open("rb") as opened:
            empty = not opened.read(1)
    except OSError as error:
        yield Problem(key, file, f"must be readable: {error.strerror}")
        return
    if empty:
        yield Problem(key, file, "must not be empty")


def _bad_addresses(config: RunConfig, services: Iterable[str]) -> Iterator[Problem]:
    hosts = {"run.host": config.run.host, "router.router_host": config.router.router_host}
    for key, host in hosts.items():
        if host and (reason := _cannot_listen(host.strip("[]"), 0)):
            yield Problem(key, host, f"must be an address of this machine: {reason}")
            return
    places = {
        "router": (router_host(config), config.router.router_port),
        "metrics": (config.run.host, config.metrics.metrics_port),
    }
    for service, (host, port) in places.items():
        if service in services and port and (reason := _cannot_listen(host.strip("[]"), port)):
            remedy = f"Give another --{service}-port, or 0 for a free one."
            yield Problem(f"{service}.{service}_port", port, f"cannot be listened on: {reason}", remedy)


def _cannot_listen(host: str, port: int) -> str | None:
    """Why host:port cannot be listened on now; None when it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def bad_hooks(config: RunConfig, services: Iterable[str], environment: Mapping[str, str]) -> list[Problem]:
    """Import the hooks in a process of its own: a user's module may do anything, and must not do it to us."""
    named: list[tuple[str, str]] = []
    if "rollout" in services:
        named += [(f"rollout.{key}", path) for key in HOOK_KEYS if (path := getattr(config.rollout, key))]
    if "metrics" in services:
        named += [("metrics.metrics_sink", path) for path in config.metrics.metrics_sink]
    if not named:
        return []
    pairs = [f"{key}={path}" for key, path in named]
    limit_s = config.run.start_timeout_s
    try:
        done = subprocess.run(
            [sys.executable, "-m", "furlong.launch.try_hooks", *pairs],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            env=dict(environment),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Problem("hooks", pairs, f"must import within {limit_s:g} s (--start-timeout-s)")]
    try:
        return [Problem(*item) for item in json.loads(done.stdout)]
    except ValueError:  # the process ended without an answer
        said = done.stderr.decode(errors="replace").strip()[-2000:]
        return [Problem("hooks", pairs, f"importing them ended with exit code {done.returncode}: {said}")]
