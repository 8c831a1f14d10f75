"""The control surface over HTTP as one ASGI application: everything that the router does not pass to one worker.

Puts the routes of its neighbours together behind the gate, and says in OpenAPI what they say; decides nothing itself.
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from furlong import __version__
from services.router.control.admin import AdminCalls
from services.router.control.changes import abort_routes, flush_routes
from services.router.control.fan_out import FanOut
from services.router.control.gate import Gate
from services.router.control.reads import load_routes, metric_routes, model_routes, old_load_routes
from services.router.control.refusals import handle_refusals
from services.router.control.registration import old_routes, worker_routes
from services.router.control.status import status_routes
from services.router.http.answers import error_content
from services.router.http.paths import NEED_NO_TOKEN
from services.router.router import Router
from services.router.watch.metrics_route import metrics_routes

OPENAPI_PATH = "/router/openapi.json"


def control_app(router: Router) -> FastAPI:
    """The control surface."""
    app = FastAPI(
        title="Furlong router",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=OPENAPI_PATH,
        redirect_slashes=False,
    )
    handle_refusals(app, router.settings)
    _answer_bad_parameters(app)
    fan_out = FanOut(worker_ca=router.settings.worker_ca, identity=router.identity)
    for routes in (
        worker_routes(router),
        old_routes(router),
        status_routes(router),
        abort_routes(router, fan_out),
        flush_routes(router, fan_out),
        model_routes(router, fan_out),
        load_routes(router, fan_out),
        old_load_routes(router, fan_out),
        metric_routes(router, fan_out),
        metrics_routes(router),
    ):
        app.include_router(routes)
    app.router.default = AdminCalls(router, fan_out)
    app.add_middleware(Gate, token=router.token, identity=router.identity)
    _describe(app, token_needed=router.token.needed)
    return app


def _answer_bad_parameters(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def bad_parameters(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [f"{'.'.join(str(part)[:50] for part in found['loc'])}: {found['msg']}" for found in error.errors()]
        return JSONResponse(error_content("bad_request", "; ".join(problems[:8])), 400)


def _describe(app: FastAPI, *, token_needed: bool) -> None:
    """Make OpenAPI say what is so: errors have the router's shape, and which paths want the token."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        known = app.openapi_schema is not None
        schema = made()
        if known:
            return schema
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if token_needed and path not in NEED_NO_TOKEN:
                    operation["security"] = [{"token": []}]
        for unused in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(unused, None)
        if token_needed:
            schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
