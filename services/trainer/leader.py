"""Rank 0 from the rendezvous to the end of the loop: serves Trainer, restores, and runs the loop over all ranks."""

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping

import structlog
from torch.distributed import Store

from furlong import addresses, rpc
from furlong.addresses import join_host_port
from furlong.config import ConfigError, RunConfig
from furlong.config.errors import Problem
from furlong.phases import PhaseReport
from furlong.process import ExitCode
from furlong.service import ServiceContext
from furlong.v1 import trainer_pb2_grpc
from services.trainer.alert_hearing import hearing_alerts, tell_run_ended, tell_run_started
from services.trainer.attempt import read_attempt
from services.trainer.backend import Backend
from services.trainer.checkpoint import Checkpoint, Checkpoints, Meta, differences
from services.trainer.fingerprint import advisory_of, fingerprint_of
from services.trainer.fsdp_backend import FsdpBackend
from services.trainer.loop import Loop, Parts
from services.trainer.publisher import Publisher
from services.trainer.ranks import STOP_KEY, Everyone, PeerWatch
from services.trainer.rendezvous import STORE, Rendezvous, leave, meet, open_store
from services.trainer.row_writer import RowWriter
from services.trainer.servicer import SERVICE, TrainerServicer
from services.trainer.session import Session
from services.trainer.status import Status
from services.trainer.torch_setup import set_up_torch

log = structlog.get_logger()


def lead(context: ServiceContext, checkpoints: Checkpoints, rows: RowWriter, *, begun: threading.Event) -> ExitCode:
    """Rank 0's life. Raises what `main` turns into an exit code. begun: set once the loop minds stops itself."""
    config = context.config
    set_up_torch(config)
    status = Status(PhaseReport(context.telemetry))
    tell_run_started(context)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_serving(context, status))
        stack.callback(leave)
        store = open_store(config, context.run_dir)
        addresses.publish(
            context.run_dir,
            context.instance,
            grpc=server.address,
            extra={STORE: join_host_port(config.run.host, store.port)},
        )
        met = meet(config, context.run_dir, rank=0, own_store=store)
        watch = PeerWatch(met.peers, context.telemetry).start()
        backend, release = _backend(config, met, stack)
        newest = checkpoints.newest()
        if newest is not None:
            _restore(config, backend, newest)
        loop, session = _assemble(context, met, backend, checkpoints, newest, status, rows)
        server.set_serving(serving=True)
        begun.set()
        try:
            with hearing_alerts(context, rows):
                code = loop.run()
        finally:
            session.close()
        watch.stop()
        release()
        tell_run_ended(context, code)
        return code


@contextlib.contextmanager
def _serving(context: ServiceContext, status: Status) -> Generator[rpc.SyncServer]:
    config = context.config
    servicer = TrainerServicer(
        status,
        context.stop,
        num_rollout=config.run.num_rollout,
        world_size=config.trainer.trainer_num_ranks,
    )
    server = rpc.start_sync_server(
        lambda server: trainer_pb2_grpc.add_TrainerServicer_to_server(servicer, server),
        names=(SERVICE,),
        host=config.run.host,
    )
    try:
        yield server
    finally:
        server.drain(1.0)


def _backend(config: RunConfig, met: Rendezvous, stack: contextlib.ExitStack) -> tuple[Backend, Callable[[], None]]:
    """The backend that the loop sees, and what lets the other ranks go."""
    own = FsdpBackend(config, met.info)
    stack.callback(own.close)
    _warn_of_absent_ranks(config, met.info.world_size)
    if met.store is None or met.info.world_size == 1:
        return own, lambda: None
    everyone = Everyone(own, met.store)
    return everyone, everyone.end


def _warn_of_absent_ranks(config: RunConfig, world_size: int) -> None:
    absent = [rank for rank in config.trainer.profile_ranks if rank >= world_size]
    if absent:
        log.warning("profile_ranks_absent", ranks=absent, world_size=world_size)


def _assemble(
    context: ServiceContext,
    met: Rendezvous,
    backend: Backend,
    checkpoints: Checkpoints,
    newest: Checkpoint | None,
    status: Status,
    rows: RowWriter,
) -> tuple[Loop, Session]:
    """Connect to rollout, publish the first weights, and put the loop together."""
    config = context.config
    start = 0 if newest is None else newest.meta.rollout_id + 1
    status.update(
        policy_version=start,
        train_step=backend.train_step,
        checkpoint_rollout_id=None if newest is None else newest.meta.rollout_id,
    )
    publisher = Publisher(config, backend, device_type=met.info.device.type)
    session = Session(config, context.run_dir, publisher, attempt=read_attempt(context.run_dir))
    session.begin(None if newest is None else newest.rollout_state(), next_rollout_id=start)
    log.info("training_begins", next_rollout_id=start, num_rollout=config.run.num_rollout)
    parts = Parts(
        config=config,
        backend=backend,
        session=session,
        checkpoints=checkpoints,
        telemetry=context.telemetry,
        rows=rows,
        status=status,
        stop=context.stop,
        num_devices=met.info.world_size,
        fingerprint=fingerprint_of(config, backend.layouts()),
        advisory=advisory_of(config),
        poll_stop=_stop_poll(context, met.store),
    )
    owed = newest is None or newest.meta.evaluation_owed
    return Loop(parts, start=start, evaluation_owed=owed), session


def _stop_poll(context: ServiceContext, store: Store | None) -> Callable[[], None]:
    """Hears a stop signal that another rank got."""

    def poll() -> None:
        if store is not None and not context.stop.requested.is_set() and store.check([STOP_KEY]):
            context.stop.request(store.get(STOP_KEY).decode())

    return poll


def _restore(config: RunConfig, backend: Backend, checkpoint: Checkpoint) -> None:
    """Take a checkpoint over. Raises ConfigError when it is another model's."""
    meta = checkpoint.meta
    changed = differences(meta.fingerprint, fingerprint_of(config, backend.layouts()))
    if changed:
        rule = f"must be what checkpoint {checkpoint.folder.name} was made with: {'; '.join(changed)}"
        remedy = "Use another --run-dir for another model."
        raise ConfigError([Problem("run.run_dir", config.run.run_dir, rule, remedy)])
    _warn_of_changes(meta, config)
    backend.restore(str(checkpoint.folder))
    log.info("checkpoint_restored", folder=checkpoint.folder.name, policy_version=meta.policy_version)


def _warn_of_changes(meta: Meta, config: RunConfig) -> None:
    now: Mapping[str, str] = advisory_of(config)
    for change in differences(meta.advisory, now):
        log.warning("resumed_with_another_setting", change=change)
