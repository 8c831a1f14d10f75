"""What `furlong up` starts: for each instance its command, its environment, and what becomes of its output. Pure.

A secret goes only to the service that needs it: WANDB_* variables and Slack's URL reach the metrics service alone.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from furlong.config import RunConfig

METRICS_ONLY = ("WANDB_", "FURLONG_SLACK_WEBHOOK_URL")
# wandb's own channel between a parent and its children: a child that inherits it finds its run "in use".
NEVER_PASSED = ("WANDB_SERVICE",)
DEFAULTS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ALWAYS = {"PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class ChildPlan:
    """One process to start."""

    instance: str
    """For example `trainer-0`."""
    service: str
    """For example `trainer`; also the extra of the package that it needs."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    relayed: bool = False
    """Its stdout is shown on ours, besides being kept in its file."""
    awaited: bool = True
    """It publishes an address and says SERVING when it can work."""

    @property
    def is_trainer(self) -> bool:
        """The trainers end when the run is done; the others serve until they are told to stop."""
        return self.service == "trainer"


def plan_children(
    config: RunConfig, *, config_path: Path, parent_pid: int, environment: Mapping[str, str]
) -> list[ChildPlan]:
    """The processes of a run, in the order in which they are started; services that run elsewhere are left out."""
    elsewhere = {
        "metrics": config.metrics.metrics_addr,
        "router": config.router.router_addr,
        "rollout": config.rollout.rollout_addr,
    }
    ranks = [("metrics", 0), ("router", 0), ("rollout", 0)]
    ranks += [("trainer", rank) for rank in range(config.trainer.trainer_num_ranks)]
    plans = []
    for service, rank in ranks:
        if elsewhere.get(service):
            continue
        is_trainer = service == "trainer"
        plans.append(
            ChildPlan(
                instance=f"trainer-{rank}" if is_trainer else service,
                service=service,
                command=service_command(service, rank=rank, config_path=config_path, parent_pid=parent_pid),
                environment=child_environment(service, environment),
                relayed=is_trainer and rank == 0,
                awaited=not is_trainer or rank == 0,
            )
        )
    return plans


def service_command(service: str, *, rank: int, config_path: Path, parent_pid: int) -> tuple[str, ...]:
    """The command line of one service. It holds no secret, since the configuration holds none."""
    leash = ("--parent-pid", str(parent_pid))
    place = ("--config", str(config_path), "--rank", str(rank))
    return (sys.executable, "-m", "furlong", service, *place, *leash)


def child_environment(service: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Our environment for a child: everything but what is another's secret, with defaults for what is not set."""
    passed = {
        name: value
        for name, value in environment.items()
        if name not in NEVER_PASSED and (service == "metrics" or not name.startswith(METRICS_ONLY))
    }
    return {**DEFAULTS, **passed, **ALWAYS}
