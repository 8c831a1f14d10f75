"""The configuration of a metrics service alone: that of no run. Pure but for `--help`, which prints and ends."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from furlong.config.errors import ConfigError, Problem
from furlong.config.load import OwnFlag, Tree, known_flags, problems_of, read_flags
from furlong.config.rules import check_host, check_metrics
from furlong.config.sections import MetricsSection, RunConfig

DEFAULT_PORT = 8660
DEFAULT_DIR = "furlong-metrics"
NAME = "metrics-service"
"""The run that the service's own log lines are filed under."""
_OF_RUNS = ("metrics_port", "metrics_addr", "telemetry_queue_size", "telemetry_spool_bytes")
OFFERED: Mapping[str, tuple[str, ...]] = {
    "run": ("name", "drain_budget_s", "log_level"),
    "metrics": tuple(name for name in MetricsSection.model_fields if name not in _OF_RUNS),
}


OWN = (
    OwnFlag("port", DEFAULT_PORT, "Port of HTTP. 0: a free one. gRPC has the next one."),
    OwnFlag("host", RunConfig().run.host, "Address to listen on: of this host's loopback interface, IPv4 or IPv6."),
    OwnFlag("dir", DEFAULT_DIR, "Folder of what it keeps. Only one service works in a folder at a time."),
)
"""Taken out of the command line before the others are read."""
_OWN_NAMES = frozenset(flag.name for flag in OWN)


def is_offered(flag: str) -> bool:
    """Whether a word of the command line is no flag, or one that a service alone takes."""
    if not flag.startswith("--"):
        return True
    field = flag.removeprefix("--").partition("=")[0].removeprefix("no-").replace("-", "_")
    return field == "help" or field in _OWN_NAMES or any(field in fields for fields in OFFERED.values())


def describes_run(flag: str) -> bool:
    """Whether a word is a flag of runs that a service alone does not take."""
    name = flag.removeprefix("--").partition("=")[0].replace("_", "-")
    return flag.startswith("--") and not is_offered(flag) and name in known_flags()


def load_alone(
    flags: Sequence[str], *, port: int, host: str | None, folder: str, prog: str, description: str
) -> RunConfig:
    """What the flags say. port: of HTTP; gRPC has the next one unless it is named. Raises ConfigError."""
    defaults: Tree = {"run": {"name": NAME}}
    tree = read_flags(flags, tree=defaults, prog=prog, description=description, offered=OFFERED, own=OWN)
    run, metrics = tree.setdefault("run", {}), tree.setdefault("metrics", {})
    run["run_dir"] = folder
    if host is not None:
        run["host"] = host
    metrics["metrics_port"] = port
    metrics.setdefault("metrics_grpc_port", port + 1 if port else 0)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems_of(error)) from error
    if problems := [*check_host(config), *check_metrics(config), *_check_ports(config)]:
        raise ConfigError(problems)
    return config


def _check_ports(config: RunConfig) -> list[Problem]:
    metrics = config.metrics
    if not metrics.metrics_port or metrics.metrics_port != metrics.metrics_grpc_port:
        return []
    rule = "must not be the port of HTTP"
    return [Problem("metrics.metrics_grpc_port", metrics.metrics_grpc_port, rule, "Leave --metrics-grpc-port out.")]
