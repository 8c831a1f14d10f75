"""`furlong metrics|router|rollout|trainer`: one service, in the foreground.

What `furlong up` starts, and what a service manager starts. Finds the service by its entry point; imports none itself.
"""

import os
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from furlong.cli.alone import is_alone, run_alone
from furlong.cli.arguments import read_run, take_options, whole_number
from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.launch.preflight import bad_hooks, missing_packages
from furlong.process import die_with_parent

GROUP = "furlong.services"
OPTIONS = ("config", "rank", "parent-pid")


def run_service(service: str, arguments: Sequence[str]) -> int:
    """Run it until it is done or told to stop; its exit code. Raises ConfigError.

    --rank N: which trainer rank this is. --parent-pid PID: end when that process, which must be our parent, ends.
    """
    if is_alone(service, arguments):
        return run_alone(service, arguments)
    taken = take_options(arguments, OPTIONS)
    parent_pid = whole_number(taken.options, "parent-pid")
    die_with_parent(parent_pid)
    rank = whole_number(taken.options, "rank") or 0
    config = read_run(taken, prog=f"furlong {service}", description=f"Run the {service} service in the foreground.")
    _refuse_rank(service, rank, num_ranks=config.trainer.trainer_num_ranks)
    problems = missing_packages(config, [service])
    if not problems and parent_pid is None:  # what `furlong up` starts, it has looked at
        problems = bad_hooks(config, [service], os.environ)
    if problems:
        raise ConfigError(problems)
    return load_service(service)(config, rank=rank, foreground=parent_pid is None)


def load_service(service: str) -> Callable[..., int]:
    """The service's `main`. Raises ConfigError."""
    os.environ.pop("WANDB_SERVICE", None)  # the channel of another process's wandb, of no use here
    found = entry_points(group=GROUP, name=service)
    if not found:
        rule = f"has no entry point in the group {GROUP}"
        raise ConfigError([Problem("install", service, rule, "Install the package again: pip install -e .")])
    main: Callable[..., int] = next(iter(found)).load()
    return main


def _refuse_rank(service: str, rank: int, *, num_ranks: int) -> None:
    if service != "trainer" and rank:
        raise ConfigError([Problem("--rank", rank, f"must be left out: there is one {service}")])
    if service == "trainer" and rank >= num_ranks:
        remedy = "Raise --trainer-num-ranks, the same for all ranks."
        raise ConfigError([Problem("--rank", rank, f"must be below trainer_num_ranks ({num_ranks})", remedy)])
