"""Whom a call to many workers goes to, and with which key of the client's."""

from fastapi import Request

from services.router.control.fan_out import Headers
from services.router.control.refusals import unavailable
from services.router.control.token import AUTHORIZATION
from services.router.router import Router
from services.router.workers.worker import Worker


def every_worker(router: Router) -> list[Worker]:
    """Every worker that may be answering something. Raises Refusal."""
    workers = router.workers.everyone()
    if not workers:
        raise unavailable(router.settings, "no_ready_worker", "no worker is registered")
    return workers


def key_for_engines(router: Router, request: Request) -> Headers:
    """The client's own key for the engines, as it goes with a generation. Never the router's token."""
    sent = [pair for pair in request.scope["headers"] if pair[0] == AUTHORIZATION]
    return router.token.without(sent)
