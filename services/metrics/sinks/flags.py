"""The sinks that a run's flags name. Reads nothing but the files that hold URLs."""

import os
from collections.abc import Mapping

from furlong.config import ConfigError, RunConfig
from furlong.config.destinations import url_of
from furlong.config.errors import Problem
from services.metrics.sinks.sink import SinkSpec


def specs_of(config: RunConfig, environment: Mapping[str, str] | None = None) -> list[SinkSpec]:
    """One a sink, in the order that status shows them. Raises ConfigError: the file of a URL is gone."""
    metrics, root = config.metrics, config.run.run_dir
    specs = [SinkSpec("jsonl", "jsonl")]
    wandb = _wandb_options(config, os.environ if environment is None else environment)
    if metrics.use_wandb and wandb["mode"] != "disabled":
        specs.append(SinkSpec("wandb", "wandb", wandb))
    if metrics.use_tensorboard:
        folder = metrics.metrics_tensorboard_dir or os.path.join(root, "tensorboard")
        specs.append(SinkSpec("tensorboard", "tensorboard", {"dir": folder}))
    if metrics.mlflow_tracking_uri:
        options = {"uri": metrics.mlflow_tracking_uri, "experiment": metrics.mlflow_experiment or "furlong"}
        specs.append(SinkSpec("mlflow", "mlflow", options))
    if metrics.statsd_addr:
        specs.append(SinkSpec("statsd", "statsd", {"addr": metrics.statsd_addr, "prefix": metrics.statsd_prefix}))
    if metrics.otlp_endpoint:
        endpoint = _url("otlp_endpoint", metrics.otlp_endpoint)
        specs.append(SinkSpec("otlp", "otlp", {"endpoint": endpoint}))
        specs.append(SinkSpec("otlp_logs", "otlp_logs", {"endpoint": endpoint}))
    if metrics.metrics_webhook:
        specs.append(SinkSpec("webhook", "webhook", {"url": _url("metrics_webhook", metrics.metrics_webhook)}))
    specs += [SinkSpec(path, "python", {"class": path}) for path in dict.fromkeys(metrics.metrics_sink)]
    return specs


def _url(field: str, given: str) -> str:
    try:
        return url_of(given)
    except ValueError as error:
        raise ConfigError([Problem(f"metrics.{field}", given, str(error), "See its path and mode.")]) from error


def _wandb_options(config: RunConfig, environment: Mapping[str, str]) -> dict[str, object]:
    metrics = config.metrics
    return {
        "project": metrics.wandb_project or "furlong",
        "group": metrics.wandb_group,
        "team": metrics.wandb_team,
        "run_name": metrics.wandb_run_name,
        "dir": metrics.wandb_dir,
        "mode": wandb_mode(metrics.wandb_mode, environment),
        "init_timeout_s": metrics.wandb_init_timeout_s,
    }


def wandb_mode(given: str | None, environment: Mapping[str, str]) -> str:
    """As given, by flag or WANDB_MODE; else online when there is a key, else offline."""
    if given or environment.get("WANDB_MODE") in ("online", "offline", "disabled"):
        return given or environment["WANDB_MODE"]
    return "online" if environment.get("WANDB_API_KEY") or environment.get("WANDB_API_KEY_FILE") else "offline"
