"""The frame around every service: logs, telemetry, stop signal, event loop, exit code.

A service's package has `main(config, *, rank, foreground) -> int`, found by the CLI through the entry-point group
`furlong.services`. An asyncio service calls `run_async` there; the trainer, which is not asyncio, uses `start` alone.
"""

import asyncio
import contextlib
import os
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import structlog

from furlong import addresses, logs
from furlong.addresses import NotReachable, PortTaken
from furlong.config import ConfigError, RunConfig, to_toml
from furlong.config.errors import refusal
from furlong.process import STARTED_AGAIN, ExitCode, StopSignal
from furlong.rundir import RunDir, write_atomically
from furlong.telemetry import Telemetry

log = structlog.get_logger()


@dataclass(frozen=True)
class ServiceContext:
    """What every service has at hand."""

    config: RunConfig
    run_dir: RunDir
    instance: str
    """For example `rollout` or `trainer-0`."""
    telemetry: Telemetry
    stop: StopSignal

    def watch(self, task: "asyncio.Task[object]") -> "asyncio.Task[object]":
        """A background task that ends in an error ends the service, with the error in the log."""

        def ended(done: "asyncio.Task[object]") -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("task_failed", task=done.get_name(), error=repr(error), exc_info=error)
                self.stop.request(f"task {done.get_name()} failed: {error!r}", code=ExitCode.CRASHED)

        task.add_done_callback(ended)
        return task


def start(
    config: RunConfig,
    *,
    service: str,
    instance: str,
    rank: int | None = None,
    foreground: bool,
    alone: bool = False,
) -> ServiceContext:
    """Set up logs, telemetry and the stop signal. Main thread only. Raises ConfigError if the run directory cannot be
    written.

    foreground: also log to stderr, for who runs one service by hand or under systemd.
    alone: the service belongs to no run.
    """
    run_dir = RunDir(Path(config.run.run_dir)).create(alone=service if alone else "")
    if (
        not alone and not run_dir.config.exists()
    ):  # `furlong up` writes it; services that are started one by one do here
        write_atomically(run_dir.config, to_toml(config).encode(), mode=0o600)
    telemetry = Telemetry.for_run(config, run_dir, service=service, instance=instance)
    if alone and service != "metrics" and not config.metrics.metrics_addr:
        telemetry.switch_off()
    logs.configure(
        run=config.run.name,
        service=service,
        instance=instance,
        rank=rank,
        level=config.run.log_level,
        path=run_dir.log(instance),
        to_stderr=foreground,
        telemetry=telemetry,
    )
    if before := os.environ.pop(STARTED_AGAIN, ""):
        log.warning("service_started_again", before=before)
    return ServiceContext(config, run_dir, instance, telemetry, StopSignal().install())


Serve = Callable[[ServiceContext], AbstractAsyncContextManager[None]]


def run_async(
    config: RunConfig,
    *,
    service: str,
    foreground: bool,
    serve: Serve,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    alone: bool = False,
) -> int:
    """Run an asyncio service until it is asked to stop; the exit code.

    serve: an async context manager that has the service SERVING when entered and drains it when left.
    loop_factory: for example `uvloop.new_event_loop`. None: asyncio's own loop.
    alone: the service belongs to no run.
    """
    context = start(config, service=service, instance=service, foreground=foreground, alone=alone)

    try:
        return int(_guarded(context, serve, loop_factory))
    finally:
        with contextlib.suppress(NotReachable, OSError):  # a stale entry does no harm: it counts only while we live
            addresses.withdraw(context.run_dir, context.instance)
        context.telemetry.close(timeout_s=5.0)


def _guarded(
    context: ServiceContext, serve: Serve, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None
) -> ExitCode:
    ready = False

    async def until_stopped() -> None:
        nonlocal ready
        async with serve(context):
            ready = True
            log.info("service_ready")
            await context.stop.wait()
            log.info("service_stopping", reason=context.stop.reason)

    async def watched() -> ExitCode:
        main = asyncio.ensure_future(until_stopped())
        stop = asyncio.ensure_future(context.stop.wait())
        await asyncio.wait({main, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not main.done() and ready:
            await asyncio.wait({main}, timeout=context.config.run.drain_budget_s)
        if not main.done():  # still starting, or draining for longer than its budget
            log.warning("service_cut_short", was_ready=ready, budget_s=context.config.run.drain_budget_s)
            main.cancel()
            await asyncio.wait({main}, timeout=5.0)
        if main.done() and not main.cancelled():
            main.result()
        return context.stop.code

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(watched())
    except (ConfigError, PortTaken) as error:
        return fail(str(error), ExitCode.BAD_CONFIG)
    except NotReachable as error:
        return fail(str(error), ExitCode.PEER_LOST)
    except Exception as error:  # the top of the process
        log.error("service_crashed", error=repr(error), exc_info=error)
        traceback.print_exception(error)
        return ExitCode.CRASHED


def fail(message: str, code: ExitCode) -> ExitCode:
    """Say on stderr, in words, and in the log why the service cannot go on; the code."""
    import sys

    with contextlib.suppress(OSError, ValueError):  # a stderr that is closed changes nothing
        print(refusal(message) if code is ExitCode.BAD_CONFIG else message, file=sys.stderr, flush=True)
    with logs.not_to_stderr():
        log.error("service_failed", reason=message, exit_code=int(code))
    return code
