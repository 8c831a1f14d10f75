"""The configuration of a service alone, which belongs to no run: of the metrics service, of the router.

Pure but for `--help`, which prints and ends.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from furlong.config.errors import ConfigError, Problem
from furlong.config.load import OwnFlag, Tree, known_flags, problems_of, read_flags
from furlong.config.routerrules import check_router
from furlong.config.rules import check_host, check_metrics, check_metrics_addr
from furlong.config.sections import MetricsSection, RouterSection, RunConfig

_PORT = "Port of HTTP. 0: a free one."
_DIR = "Folder of what it keeps. Only one service works in a folder at a time."


@dataclass(frozen=True)
class Alone:
    """What one service takes when it runs alone."""

    service: str
    """Also the section of its flags."""
    port: int
    folder: str
    name: str
    """The run that its own log lines are filed under."""
    host_field: tuple[str, str]
    """Section and field that the host goes to."""
    offered: Mapping[str, tuple[str, ...]]
    """Section -> the fields that are taken."""
    own: tuple[OwnFlag, ...]
    """Taken out of the command line before the others are read."""
    check: Callable[[RunConfig], list[Problem]]
    prefix: str = ""
    """Fields whose names begin so have flags with and without it."""
    defaults: Mapping[str, object] | None = None
    """Of fields of its section, where they are others than a run's."""

    def is_offered(self, flag: str) -> bool:
        """Whether a word of the command line is no flag, or one that is taken."""
        if not flag.startswith("--"):
            return True
        field = flag.removeprefix("--").partition("=")[0].removeprefix("no-").replace("-", "_")
        own = {flag.name for flag in self.own}
        known = {field, self.prefix + field}
        return (
            field == "help"
            or field.removeprefix(self.prefix) in own
            or any(known & set(fields) for fields in self.offered.values())
        )

    def describes_run(self, flag: str) -> bool:
        """Whether a word is a flag of runs that a service alone does not take."""
        name = flag.removeprefix("--").partition("=")[0].replace("_", "-")
        return flag.startswith("--") and not self.is_offered(flag) and name in known_flags()

    def with_prefix(self, name: str) -> str:
        """A flag's name, without dashes, as a run spells it."""
        off = "no-" if name.startswith("no-") else ""
        field = self.prefix + name.removeprefix("no-").replace("-", "_")
        in_section = self.prefix and field in self.offered[self.service]
        return f"{off}{field.replace('_', '-')}" if in_section else name

    def as_typed(self, problem: Problem) -> Problem:
        """A problem in the words of this command line: keys of sections are its flags, without the prefix."""
        section, _, field = problem.key.partition(".")
        key = f"--{field.removeprefix(self.prefix).replace('_', '-')}" if section in self.offered and field else section
        return replace(
            problem,
            key=problem.key if problem.key.startswith("--") else key,
            rule=self._as_typed(problem.rule),
            remedy=self._as_typed(problem.remedy),
        )

    def _as_typed(self, text: str) -> str:
        if not self.prefix:
            return text
        text = re.sub(rf"(?<![\w-])--{self.prefix.replace('_', '-')}(?=[a-z])", "--", text)
        return re.sub(rf"\b{self.prefix}([a-z_]+)", lambda found: f"--{found[1].replace('_', '-')}", text)


def _fields(section: type[MetricsSection] | type[RouterSection], *besides: str) -> tuple[str, ...]:
    return tuple(name for name in section.model_fields if name not in besides)


_RUN = ("name", "drain_budget_s", "log_level")
METRICS = Alone(
    service="metrics",
    port=8660,
    folder="furlong-metrics",
    name="metrics-service",
    host_field=("run", "host"),
    offered={
        "run": _RUN,
        "metrics": _fields(
            MetricsSection, "metrics_port", "metrics_addr", "telemetry_queue_size", "telemetry_spool_bytes"
        ),
    },
    own=(
        OwnFlag("port", 8660, f"{_PORT} gRPC has the next one."),
        OwnFlag("host", RunConfig().run.host, "Address to listen on: of this host's loopback interface, IPv4 or IPv6."),
        OwnFlag("dir", "furlong-metrics", _DIR),
    ),
    check=lambda config: [*check_host(config), *check_metrics(config)],
)
ROUTER = Alone(
    service="router",
    port=30000,
    folder="furlong-router",
    name="router",
    host_field=("router", "router_host"),
    offered={
        "run": _RUN,
        "router": _fields(RouterSection, "router_port", "router_host", "router_addr"),
        "metrics": ("metrics_addr",),
    },
    own=(
        OwnFlag("port", 30000, _PORT),
        OwnFlag("host", RunConfig().run.host, "Address to listen on. Other than loopback needs --token-file."),
        OwnFlag("dir", "furlong-router", f"{_DIR} Workers that are registered are in it, and come back."),
    ),
    check=lambda config: [*check_router(config), *check_metrics_addr(config)],
    prefix="router_",
    defaults={"router_require_policy_version": False},
)


def load_alone(kind: Alone, flags: Sequence[str], *, port: int, host: str | None, folder: str, about: str) -> RunConfig:
    """What the flags say. port: of HTTP. about: what `--help` says first. Raises ConfigError."""
    defaults: Tree = {"run": {"name": kind.name}, kind.service: dict(kind.defaults or {})}
    tree = read_flags(
        flags,
        tree=defaults,
        prog=f"furlong {kind.service}",
        description=about,
        offered=kind.offered,
        own=kind.own,
        prefix=kind.prefix,
    )
    tree.setdefault("run", {})["run_dir"] = folder
    section = tree.setdefault(kind.service, {})
    if host is not None:
        host_section, field = kind.host_field
        tree.setdefault(host_section, {})[field] = host
    section[f"{kind.service}_port"] = port
    if kind is METRICS:
        section.setdefault("metrics_grpc_port", port + 1 if port else 0)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([kind.as_typed(problem) for problem in problems_of(error)]) from error
    if problems := [kind.as_typed(problem) for problem in (*kind.check(config), *_check_ports(kind, config))]:
        raise ConfigError(problems)
    return config


def _check_ports(kind: Alone, config: RunConfig) -> list[Problem]:
    section = getattr(config, kind.service)
    http, grpc = (getattr(section, f"{kind.service}_{name}") for name in ("port", "grpc_port"))
    if not http or http != grpc:
        return []
    rule, flag = "must not be the port of HTTP", f"--{kind.service}-grpc-port"
    return [Problem(f"{kind.service}.{kind.service}_grpc_port", grpc, rule, f"Leave {flag} out.")]
