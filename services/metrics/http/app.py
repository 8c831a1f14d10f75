"""The HTTP application: every address of the metrics service, its errors, and its page of documentation."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Response
from fastapi.routing import APIRoute

from furlong import __version__
from furlong.v1.metrics_pb2 import GetMetricsStatusResponse
from services.metrics.http import asking, errors, live, records, sinks, state
from services.metrics.http.guard import Guard, MethodTable

if TYPE_CHECKING:
    from services.metrics.parts import Parts

DESCRIPTION = """Takes in log lines and numbers of any number of runs, keeps them on disk, and answers questions about
them. Errors are JSON: {"error": what is wrong, "remedy": what to do}."""


def make_app(
    parts: "Parts", *, status: Callable[[], Awaitable[GetMetricsStatusResponse]], more: Sequence[APIRouter] = ()
) -> FastAPI:
    """The application.

    status: what gRPC's GetStatus says. more: routes of other parts of the service.
    """
    app = FastAPI(title="Furlong metrics", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None)
    errors.install(app)
    ours = [
        records.router(parts.writer, parts.ready.is_set),
        asking.router(parts.queries),
        live.router(parts.queries, parts.feed),
        sinks.router(parts.sinks),
        state.router(writer=parts.writer, status=status, is_ready=parts.ready.is_set),
        _pages(),
    ]
    methods = MethodTable()
    for routes in (*ours, *more):
        app.include_router(routes)
        for route in routes.routes:
            if isinstance(route, APIRoute):
                methods.add(route.path, route.methods or ())
    methods.add("/openapi.json", ["GET"])
    app.add_middleware(Guard, methods=methods)
    return app


def _pages() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    page = (Path(__file__).parent / "docs.html").read_bytes()

    @routes.get("/")
    @routes.get("/docs")
    async def docs() -> Response:
        """The documentation; it needs nothing from elsewhere."""
        return Response(page, media_type="text/html; charset=utf-8")

    return routes
