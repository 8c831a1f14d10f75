"""Every rank but rank 0: meets the others, and makes the calls that rank 0 announces."""

import threading

import structlog

from furlong import addresses
from furlong.process import ExitCode, StopSignal
from furlong.service import ServiceContext
from services.trainer.fsdp_backend import FsdpBackend
from services.trainer.ranks import STOP_KEY, PeerWatch, follow
from services.trainer.rendezvous import Rendezvous, meet
from services.trainer.torch_setup import set_up_torch

log = structlog.get_logger()


def run_follower(context: ServiceContext, rank: int, *, begun: threading.Event) -> ExitCode:
    """A rank's life. Its own stop signal is told to rank 0, which ends the run for all. May raise PeerLost.

    begun: set once rank 0 can hear of a stop.
    """
    config = context.config
    set_up_torch(config)
    addresses.publish(context.run_dir, context.instance)
    met = meet(config, context.run_dir, rank=rank, own_store=None)
    assert met.store is not None  # several ranks always have one
    watch = PeerWatch(met.peers, context.telemetry).start()
    _tell_stop(context.stop, met)
    begun.set()
    backend = FsdpBackend(config, met.info)
    try:
        follow(backend, met.store, at_end=watch.stop)
    finally:
        backend.close()
    return ExitCode.DRAINED if context.stop.requested.is_set() else ExitCode.DONE


def _tell_stop(stop: StopSignal, met: Rendezvous) -> None:
    """Pass a stop signal on to rank 0, from a thread: the main thread may sit in a collective."""

    def wait() -> None:
        stop.requested.wait()
        assert met.store is not None
        met.store.set(STOP_KEY, f"{stop.reason} at trainer-{met.info.rank}")

    threading.Thread(target=wait, name="stop-relay", daemon=True).start()
