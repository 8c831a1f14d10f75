"""Errors of the control surface: what a route raises, and how it is answered."""

import math
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from services.router.control.fan_out import Busy
from services.router.control.schemas import ErrorBody
from services.router.http.answers import error_content
from services.router.settings import RouterSettings

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
KINDS = {404: "not_found", 405: "method_not_allowed"}
DESCRIPTIONS = {
    400: "The request cannot be understood.",
    401: "The token is missing or wrong.",
    403: "Refused, whoever asks.",
    404: "There is no such worker.",
    413: "The body is too large.",
    429: "Too many workers are registered.",
    502: "Workers failed.",
    503: "No worker can answer.",
}


class Refusal(Exception):
    """A call that is answered with an error."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = headers
        self.more = more or {}
        """Further keys of the answer, beside `error`."""


def answers(*statuses: int) -> dict[int | str, dict[str, object]]:
    """How a route's errors stand in OpenAPI."""
    return {status: {"model": ErrorBody, "description": DESCRIPTIONS[status]} for status in statuses}


def unavailable(settings: RouterSettings, kind: str, message: str) -> Refusal:
    """503, with a Retry-After of the time in which the state of workers may change."""
    return Refusal(503, kind, message, headers={"retry-after": str(math.ceil(settings.health_interval_s))})


def handle_refusals(app: FastAPI, settings: RouterSettings) -> None:
    """Answer what routes raise, and what is no route at all, as JSON."""

    @app.exception_handler(Refusal)
    async def refusal(_: Request, error: Refusal) -> JSONResponse:
        content = {**error_content(error.kind, str(error)), **error.more}
        return JSONResponse(content, error.status, error.headers)

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Busy) -> JSONResponse:
        return await refusal(request, unavailable(settings, "busy", str(error)))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        kind = KINDS.get(error.status_code, "bad_request")
        headers = {"allow": ", ".join(_methods(app, request))} if error.status_code == 405 else error.headers
        return JSONResponse(error_content(kind, error.detail), error.status_code, headers)


def _methods(app: FastAPI, request: Request) -> list[str]:
    """What a path may be asked with: the framework only tells of the first route that has it."""
    found: set[str] = set()
    for method in METHODS:
        scope = {**request.scope, "method": method}
        if any(route.matches(scope)[0] is Match.FULL for route in app.routes):
            found.add(method)
    return sorted(found)
