"""`furlong metrics` and `furlong router` without a run: a service for many runs, Furlong's or others'."""

import os
import sys
from collections.abc import Sequence

from furlong.cli.arguments import take_options, whole_number
from furlong.config import ConfigError, RunConfig
from furlong.config.alone import METRICS, ROUTER, Alone, load_alone
from furlong.config.destinations import tail_problems
from furlong.config.errors import Problem
from furlong.config.sglrouter import from_sgl_router
from furlong.launch.preflight import bad_hooks, missing_packages
from furlong.launch.routerfiles import bad_router_files
from furlong.process import die_with_parent

KINDS = {kind.service: kind for kind in (METRICS, ROUTER)}
OWN = ("port", "dir")
"""With one of these it is alone, whatever else is there."""
OPTIONS = (*OWN, "host", "parent-pid")
DESCRIPTIONS = {
    "metrics": f"""The metrics service alone: takes in log lines and numbers of any number of runs over HTTP and gRPC,
keeps them, answers questions, and hands rows to sinks.

For example: furlong metrics --port {METRICS.port} --dir {METRICS.folder} --use-tensorboard

With --config FILE, or flags that describe a run, it is that run's own metrics service, as `furlong up` starts it.""",
    "router": f"""The router alone: one address in front of any number of SGLang engines, or other HTTP servers. Workers
come by --worker-urls, or register themselves: POST /workers {{"url": "http://HOST:PORT"}}.

For example: furlong router --port {ROUTER.port} --worker-urls http://10.0.0.5:30000 http://10.0.0.6:30000

Flags of sgl-router are taken where they mean the same. Each flag may have --router- before its name, as in a run.
With --config FILE, or flags that describe a run, it is that run's own router, as `furlong up` starts it.""",
}


def is_alone(service: str, arguments: Sequence[str]) -> bool:
    """Whether a command line of a service describes no run."""
    if (kind := KINDS.get(service)) is None:
        return False
    names = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if any(f"--{name}" in names for name in OWN):
        return True
    return not names & {"--config", "--rank"} and not any(map(kind.describes_run, names))


def run_alone(service: str, arguments: Sequence[str]) -> int:
    """Run it until it is told to stop; its exit code. Raises ConfigError."""
    config, parent_pid = read_alone(service, arguments)
    die_with_parent(parent_pid)
    problems = [*missing_packages(config, [service]), *tail_problems(config.metrics.tail), *bad_router_files(config)]
    if problems := problems or bad_hooks(config, [service], os.environ):
        raise ConfigError([KINDS[service].as_typed(problem) for problem in problems])
    from furlong.cli.one_service import load_service

    # on a terminal the lines below are for people, and the log is in its file
    foreground = parent_pid is None and not sys.stderr.isatty()
    return load_service(service)(config, rank=0, foreground=foreground, alone=True)


def read_alone(service: str, arguments: Sequence[str]) -> tuple[RunConfig, int | None]:
    """The configuration, and the parent that it ends with. Raises ConfigError; `--help` raises SystemExit."""
    kind = KINDS[service]
    words = from_sgl_router(arguments) if kind is ROUTER else list(arguments)
    taken = take_options(words, OPTIONS)
    flags = [_with_prefix(kind, word) for word in taken.rest]
    _refuse_flags_of_runs(kind, flags)
    port = whole_number(taken.options, "port")
    if port is not None and port > 65535:
        raise ConfigError([Problem("--port", port, "must be a port, 0 to 65535")])
    config = load_alone(
        kind,
        flags,
        port=kind.port if port is None else port,
        host=taken.options.get("host"),
        folder=os.path.normpath(taken.options.get("dir", kind.folder)),
        about=DESCRIPTIONS[service],
    )
    return config, whole_number(taken.options, "parent-pid")


def _with_prefix(kind: Alone, word: str) -> str:
    if not word.startswith("--"):
        return word
    name, has_value, value = word.removeprefix("--").partition("=")
    return f"--{kind.with_prefix(name)}{has_value}{value}"


def _refuse_flags_of_runs(kind: Alone, flags: Sequence[str]) -> None:
    problems = []
    for word in flags:
        name = word.partition("=")[0]
        if name in ("--config", "--rank"):
            rule = "does not go with --port and --dir, which start a service of no run"
            remedy = f"Use --{kind.service}-port for the port of a run's own service."
            problems.append(Problem(name, "", rule, remedy))
        elif kind.describes_run(name):
            rule = "describes a run, and a service that is started with --port or --dir belongs to none"
            problems.append(Problem(name, "", rule, "Leave it out, or leave out --port and --dir."))
    if problems:
        raise ConfigError(problems)
