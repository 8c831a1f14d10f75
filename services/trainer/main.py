"""The trainer process: what rank 0 and the other ranks do from start to end, and the exit code that tells how it ended.

Heavy imports happen in the functions, after the configuration is known to be sound.
"""

import contextlib
import os
import threading
import traceback

import grpc
import structlog

from furlong import addresses, service
from furlong.addresses import NotReachable, PortTaken
from furlong.alertrules import check_alerts
from furlong.config import ConfigError, RunConfig
from furlong.process import ExitCode
from furlong.service import ServiceContext, fail
from services.trainer.attempt import next_attempt, read_attempt
from services.trainer.checkpoint import CheckpointError, Checkpoints
from services.trainer.row import already_done
from services.trainer.row_writer import RowWriter

log = structlog.get_logger()


def main(config: RunConfig, *, rank: int, foreground: bool) -> int:
    """Run one rank of the trainer; the exit code."""
    instance = f"trainer-{rank}"
    context = service.start(config, service="trainer", instance=instance, rank=rank, foreground=foreground)
    rows = RowWriter(as_json=config.run.log_format == "json")
    try:
        return int(_guarded(context, rank, rows))
    finally:
        rows.close(1.0)
        with contextlib.suppress(NotReachable, OSError):  # a stale entry counts only while we live
            addresses.withdraw(context.run_dir, instance)
        context.telemetry.close(timeout_s=5.0)


def _guarded(context: ServiceContext, rank: int, rows: RowWriter) -> ExitCode:
    try:
        code = _run(context, rank, rows)
    except (ConfigError, PortTaken) as error:
        return fail(str(error), ExitCode.BAD_CONFIG)
    except (NotReachable, CheckpointError) as error:
        lost = isinstance(error, NotReachable)
        return fail(str(error), ExitCode.PEER_LOST if lost else ExitCode.CRASHED)
    except Exception as error:  # the top of the process
        return _crashed(error)
    log.info("trainer_ended", exit_code=int(code), reason=context.stop.reason)
    return code


def _crashed(error: Exception) -> ExitCode:
    """Tell a lost rank and a refused batch from a fault of our own; the exit code."""
    from services.trainer.batch import BadBatch
    from services.trainer.publisher import WeightSyncError
    from services.trainer.ranks import PeerLost, is_lost_peer
    from services.trainer.session import RolloutFailed

    if isinstance(error, PeerLost):
        return fail(str(error), ExitCode.PEER_LOST)
    if is_lost_peer(error):
        return fail(f"another trainer rank is gone: {error}", ExitCode.PEER_LOST)
    if isinstance(error, (BadBatch, WeightSyncError, RolloutFailed, grpc.RpcError)):
        return fail(f"{type(error).__name__}: {error}", ExitCode.CRASHED)
    log.error("service_crashed", error=repr(error), exc_info=error)
    traceback.print_exception(error)
    return ExitCode.CRASHED


def _run(context: ServiceContext, rank: int, rows: RowWriter) -> ExitCode:
    config = context.config
    checkpoints = Checkpoints(context.run_dir.checkpoints, keep=config.run.keep_checkpoints)
    saved = checkpoints.newest_rollout_id()
    if saved is not None and saved + 1 >= config.run.num_rollout and not checkpoints.owes_evaluation():
        if rank == 0:
            as_json = config.run.log_format == "json"
            rows.write(already_done(config.run.name, saved, config.run.num_rollout, as_json=as_json))
            log.info("already_done", checkpoint_rollout_id=saved, num_rollout=config.run.num_rollout)
        return ExitCode.DONE
    if rank == 0:
        if config.metrics.halt_on and (problems := check_alerts(config.metrics)):
            raise ConfigError(problems)
        context.telemetry.attempt = next_attempt(context.run_dir)
        checkpoints.clear_remains()
        from services.trainer.leader import lead

        return lead(context, checkpoints, rows, begun=_leaving_until_begun(context))
    context.telemetry.attempt = read_attempt(context.run_dir)
    from services.trainer.follower import run_follower

    return run_follower(context, rank, begun=_leaving_until_begun(context))


def _leaving_until_begun(context: ServiceContext) -> threading.Event:
    """Until the event that is returned is set, a stop ends the process at once, whatever it is waiting for: nothing is
    trained yet, and the waits of a start (peers, rollout, the first weights) hear no signal."""
    begun = threading.Event()

    def watch() -> None:
        context.stop.requested.wait()
        if begun.is_set():
            return
        log.info("stopped_while_starting", reason=context.stop.reason)
        with contextlib.suppress(NotReachable, OSError):
            addresses.withdraw(context.run_dir, context.instance)
        context.telemetry.close(timeout_s=1.0)
        os._exit(context.stop.code)

    threading.Thread(target=watch, name="stop-while-starting", daemon=True).start()
    return begun
