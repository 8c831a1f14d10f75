"""`furlong up`: the whole run on this machine.

Refuses early, locks the run directory, writes the resolved run into it, supervises the services, and says at the end
how it went and where everything is. What it prints goes through a console that cannot stop the run.
"""

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from furlong import addresses
from furlong.cli.arguments import read_run, take_options
from furlong.cli.changes import changed_values
from furlong.cli.summary import closing_lines
from furlong.config import ConfigError, RunConfig, to_toml
from furlong.config.errors import Problem
from furlong.launch.checkpoints import newest_checkpoint
from furlong.launch.console import Console
from furlong.launch.descendants import adopt_orphans
from furlong.launch.lock import RunLock
from furlong.launch.plan import ChildPlan, child_environment, plan_children
from furlong.launch.preflight import check_machine
from furlong.launch.supervisor import Limits, Supervisor
from furlong.process import ExitCode
from furlong.rundir import RunDir, write_atomically

DESCRIPTION = """Start metrics, router, rollout and trainer on this machine, watch them, and stop them together.
Ctrl-C once: finish the iteration, save a checkpoint, stop. Twice: stop at once. The same command goes on from there."""
LEFTOVER_S = 10.0
"""How long processes of an earlier, killed run may take to vanish."""
HAND_OVER_S = 15.0
"""How long the records that a shared metrics service has not taken yet may take to reach it at the end."""


def up(arguments: Sequence[str]) -> int:
    """Run it; the exit code says how it ended. Raises ConfigError for what is refused before anything starts."""
    config = read_run(take_options(arguments, ("config",)), prog="furlong up", description=DESCRIPTION)
    environment = dict(os.environ)
    run_dir = RunDir(Path(config.run.run_dir))
    plans = plan_children(config, config_path=run_dir.config, parent_pid=os.getpid(), environment=environment)
    problems = check_machine(config, {plan.service for plan in plans}, child_environment("rollout", environment))
    if problems:
        raise ConfigError(problems)
    run_dir.create()
    with _writing_into(run_dir):
        run_lock = RunLock(run_dir)
    with run_lock as lock:
        _wait_for_leftovers(run_dir)
        output, errors = Console(1), Console(2)
        try:
            again = same_command(sys.argv[0], arguments)
            return _supervise(config, run_dir, plans, lock, again=again, output=output, errors=errors)
        finally:
            output.flush(timeout_s=2.0)
            errors.flush(timeout_s=2.0)


def _supervise(
    config: RunConfig,
    run_dir: RunDir,
    plans: Sequence[ChildPlan],
    lock: RunLock,
    *,
    again: str,
    output: Console,
    errors: Console,
) -> int:
    began = time.monotonic()
    for line in _opening_lines(config, run_dir):
        output.line(f"[up] {line}")
    with _writing_into(run_dir):
        write_atomically(run_dir.config, to_toml(config).encode(), mode=0o600)
    adopt_orphans()
    supervisor = Supervisor(
        plans,
        run_dir=run_dir,
        limits=Limits(config.run.start_timeout_s, config.run.drain_budget_s),
        output=output,
        on_started=lock.record,
        on_stopping=lock.record_stopping,
    )
    ending = supervisor.run()
    if config.metrics.metrics_addr:  # its own service collects them by itself
        from furlong.handover import hand_over  # gRPC, which nothing before needs

        problem = hand_over(run_dir.spool, config.metrics.metrics_addr, timeout_s=HAND_OVER_S)
        if problem:
            output.line(f"[up] records could not be handed to {config.metrics.metrics_addr}: {problem}")
    for line in closing_lines(config, run_dir, ending, seconds=time.monotonic() - began, again=again):
        output.line(f"[up] {line}")
    output.flush(timeout_s=2.0)
    if ending.reason and ending.code not in (ExitCode.DONE, ExitCode.DRAINED, ExitCode.HALTED):
        errors.line(f"furlong: {ending.reason}")
    return ending.code


def _opening_lines(config: RunConfig, run_dir: RunDir) -> list[str]:
    """Whether this starts or goes on, and what changed since the last start."""
    lines = []
    if run_dir.config.exists():
        lines += [f"changed since the last start: {change}" for change in changed_values(run_dir.config, config)]
    checkpoint = newest_checkpoint(run_dir)
    what, total = f"run {config.run.name!r} in {run_dir.root}", config.run.num_rollout
    if checkpoint is None:
        lines.append(f"starting {what}: {total} rollouts")
    else:
        done = f"{checkpoint.rollout_id + 1} of {total} rollouts are done"
        lines.append(f"resuming {what} after rollout {checkpoint.rollout_id}: {done}")
    return lines


def same_command(program: str, arguments: Sequence[str]) -> str:
    """What to type to go on, for a program that was started as `furlong`, `python -m furlong` or a script."""
    name = Path(program).name
    if name == "furlong":
        head = ["furlong" if shutil.which("furlong") == program else program, "up"]
    else:
        head = ["python", "-m", "furlong", "up"] if name == "__main__.py" else ["python", program]
    return shlex.join([*head, *arguments])


@contextlib.contextmanager
def _writing_into(run_dir: RunDir) -> Generator[None]:
    """A file that cannot be written before anything starts is the run directory's fault, and told as such."""
    try:
        yield
    except OSError as error:
        rule = f"must be a folder that can be written: {error}"
        problem = Problem("run.run_dir", str(run_dir.root), rule, "Give another --run-dir, or mend this one.")
        raise ConfigError([problem]) from error


def _wait_for_leftovers(run_dir: RunDir) -> None:
    """Children of a killed `furlong up` end by themselves, at once; services started by hand do not."""
    deadline = time.monotonic() + LEFTOVER_S
    while alive := [entry for entry in addresses.read_addresses(run_dir).values() if entry.alive()]:
        if time.monotonic() > deadline:
            names = ", ".join(f"{entry.instance} (pid {entry.pid})" for entry in alive)
            rule = f"is in use by services that another command started: {names}"
            raise ConfigError(
                [Problem("run.run_dir", str(run_dir.root), rule, "Stop them, or give another --run-dir.")]
            )
        time.sleep(0.1)
