"""`furlong metrics` without a run: the metrics service of many runs, Furlong's or others'."""

import os
import sys
from collections.abc import Sequence

from furlong.cli.arguments import take_options, whole_number
from furlong.config import ConfigError, RunConfig
from furlong.config.alone import DEFAULT_DIR, DEFAULT_PORT, describes_run, load_alone
from furlong.config.destinations import tail_problems
from furlong.config.errors import Problem
from furlong.launch.preflight import bad_hooks, missing_packages
from furlong.process import die_with_parent

OWN = ("port", "dir")
"""With one of these it is alone, whatever else is there."""
OPTIONS = (*OWN, "host", "parent-pid")
DESCRIPTION = f"""The metrics service alone: takes in log lines and numbers of any number of runs over HTTP and gRPC,
keeps them, answers questions, and hands rows to sinks.

For example: furlong metrics --port {DEFAULT_PORT} --dir {DEFAULT_DIR} --use-tensorboard

With --config FILE, or flags that describe a run, it is that run's own metrics service, as `furlong up` starts it."""


def is_alone(arguments: Sequence[str]) -> bool:
    """Whether a command line of `furlong metrics` describes no run."""
    names = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if any(f"--{name}" in names for name in OWN):
        return True
    own = {"--config", "--rank"}
    return not names & own and not any(map(describes_run, names))


def run_alone(arguments: Sequence[str]) -> int:
    """Run it until it is told to stop; its exit code. Raises ConfigError."""
    config, parent_pid = read_alone(arguments)
    die_with_parent(parent_pid)
    problems = [*missing_packages(config, ["metrics"]), *tail_problems(config.metrics.tail)]
    if problems := problems or bad_hooks(config, ["metrics"], os.environ):
        raise ConfigError(problems)
    from furlong.cli.one_service import load_service

    # on a terminal the lines below are for people, and the log is in its file
    foreground = parent_pid is None and not sys.stderr.isatty()
    return load_service("metrics")(config, rank=0, foreground=foreground, alone=True)


def read_alone(arguments: Sequence[str]) -> tuple[RunConfig, int | None]:
    """The configuration, and the parent that it ends with. Raises ConfigError; `--help` raises SystemExit."""
    taken = take_options(arguments, OPTIONS)
    _refuse_flags_of_runs(taken.rest)
    port = whole_number(taken.options, "port")
    if port is not None and port > 65535:
        raise ConfigError([Problem("--port", port, "must be a port, 0 to 65535")])
    folder = taken.options.get("dir", DEFAULT_DIR)
    config = load_alone(
        taken.rest,
        port=DEFAULT_PORT if port is None else port,
        host=taken.options.get("host"),
        folder=os.path.normpath(folder),
        prog="furlong metrics",
        description=DESCRIPTION,
    )
    return config, whole_number(taken.options, "parent-pid")


def _refuse_flags_of_runs(flags: Sequence[str]) -> None:
    problems = []
    for word in flags:
        name = word.partition("=")[0]
        if name in ("--config", "--rank"):
            rule = "does not go with --port and --dir, which start a service of no run"
            problems.append(Problem(name, "", rule, "Use --metrics-port for the port of a run's own service."))
        elif describes_run(name):
            rule = "describes a run, and a service that is started with --port or --dir belongs to none"
            problems.append(Problem(name, "", rule, "Leave it out, or leave out --port and --dir."))
    if problems:
        raise ConfigError(problems)
