"""GET /metrics: the router as Prometheus reads it."""

import asyncio
import gzip
from typing import Protocol

from fastapi import APIRouter, Request, Response

from services.router.watch.exposition import exposition
from services.router.watch.observer import Observer
from services.router.watch.snapshot import merge
from services.router.watch.text_format import CONTENT_TYPE

MANY_WORKERS = 128
"""Up to so many, the text is made at once: it takes 50 us a worker."""


class Observed(Protocol):
    """The router."""

    @property
    def observer(self) -> Observer: ...


def metrics_routes(router: Observed) -> APIRouter:
    """For the control app to include."""
    routes = APIRouter(tags=["state"])

    @routes.get("/metrics", summary="For Prometheus to scrape", response_class=Response)
    async def metrics(request: Request) -> Response:
        snapshot = merge(await router.observer.snapshots())
        if len(snapshot["shown"]) > MANY_WORKERS:  # requests move meanwhile, though each turn of the loop is later
            text = await asyncio.to_thread(exposition, snapshot)
        else:
            text = exposition(snapshot)
        headers = {"Vary": "Accept-Encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(text, media_type=CONTENT_TYPE, headers=headers)
        body = await asyncio.to_thread(gzip.compress, text.encode(), 1)
        return Response(body, media_type=CONTENT_TYPE, headers={**headers, "Content-Encoding": "gzip"})

    return routes
