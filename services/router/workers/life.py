"""What a probe or a broken connection means for a worker's life. Decides; whoever asked tells the others.

Each function changes one worker and returns whether what the choice or a watcher sees of it has changed.
"""

import structlog

from services.router.settings import RouterSettings
from services.router.workers.worker import Life, State, Worker

log = structlog.get_logger()


def set_state(worker: Worker, *, admit: bool, policy_version: int | None, settings: RouterSettings) -> None:
    """Set admission and the policy version. Whoever confirms a version once is asked again after a restart."""
    if settings.require_policy_version:
        worker.self_admitting = worker.self_admitting and policy_version is None
    worker.admitted = admit
    worker.was_admitted = worker.was_admitted or admit
    worker.policy_version = policy_version
    log.info("worker_set", worker=worker.worker_id, url=worker.name, admit=admit, policy_version=policy_version)


def gone(worker: Worker, error: str) -> bool:
    """Nobody listens at its address: its process ended, and what weights the next one holds is not known."""
    before = (worker.state, worker.policy_version)
    _go_down(worker, error)
    changed = before != (worker.state, None)
    if changed and not worker.removed:
        log.warning("worker_gone", worker=worker.worker_id, url=worker.name, error=error)
    return changed


def probe_answered(worker: Worker, settings: RouterSettings, *, now: float) -> bool:
    """A health probe was answered well."""
    worker.good_probes += 1
    worker.bad_probes = 0
    worker.last_heard = now
    if worker.life is Life.UP or worker.good_probes < settings.health_success_threshold:
        return False
    worker.life, worker.last_error = Life.UP, ""
    log.info("worker_up", worker=worker.worker_id, url=worker.name, state=worker.state.name)
    return True


def probe_failed(
    worker: Worker, error: str, settings: RouterSettings, *, now: float, timed_out: bool, refused: bool
) -> bool:
    """A health probe got no good answer.

    timed_out: none at all; a worker that is busy with requests may miss probes.
    refused: one with an error status; a worker that takes no requests may say so (an engine is paused while it gets
    new weights).
    """
    silent_s = now - worker.last_heard
    if timed_out and worker.in_flight > 0 and silent_s < settings.health_busy_grace_s:
        return False
    if refused and worker.life is Life.UP and not worker.admitted:
        return False
    worker.good_probes = 0
    worker.bad_probes += 1
    worker.last_error = error
    if worker.life is not Life.UP or worker.bad_probes < settings.health_fail_threshold:
        return False
    _go_down(worker, error)
    log.warning("worker_down", worker=worker.worker_id, url=worker.name, error=error)
    return True


def why(workers: list[Worker]) -> str:
    """What keeps these from taking a request, in words; the first few of them."""
    if not workers:
        return "none is registered. POST /workers registers one"
    shown = [
        f"{w.name} is {w.state.name}{f' ({w.last_error})' if w.last_error else ''}"
        if w.state is not State.READY
        else f"{w.name} is answering {w.in_flight} requests"
        for w in workers[:8]
    ]
    return "; ".join(shown) + (f"; and {len(workers) - 8} more" if len(workers) > 8 else "")


def _go_down(worker: Worker, error: str) -> None:
    """What comes back may be another process, with other weights: it has to be confirmed anew."""
    worker.life, worker.last_error = Life.DOWN, error
    worker.good_probes = 0
    worker.policy_version = None
    worker.admitted = worker.admitted and worker.self_admitting
