"""Errors over HTTP: always a JSON object {"error", "remedy"}, never a stack trace."""

from collections.abc import Mapping

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

log = structlog.get_logger()


class Problem(Exception):
    """Answered with a status, what is wrong, and what to do about it."""

    def __init__(
        self, status: int, error: str, remedy: str, *, retry_after_s: int | None = None, more: Mapping[str, object] = {}
    ) -> None:
        super().__init__(error)
        self.status, self.error, self.remedy = status, error, remedy
        self.retry_after_s, self.more = retry_after_s, dict(more)

    def answer(self) -> JSONResponse:
        """The response. One that refuses a body without reading it also ends the connection."""
        headers = {"Connection": "close"} if self.status in (408, 413, 415) else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        return JSONResponse({"error": self.error, "remedy": self.remedy, **self.more}, self.status, headers=headers)


def install(app: FastAPI) -> None:
    """Have every error of the application answered so."""

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> JSONResponse:
        return error.answer()

    @app.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> JSONResponse:
        said = "; ".join(f"{item['loc'][-1]}: {item['msg']}, got {item.get('input')!r:.100}" for item in error.errors())
        return Problem(400, said or "the request is not valid", "GET /docs says what each address takes.").answer()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        remedy = "GET /docs lists the addresses."
        if error.status_code == 405 and error.headers:
            remedy = f"Use {error.headers.get('Allow', 'another method')}. {remedy}"
        response = Problem(error.status_code, f"{error.detail}: {request.method} {request.url.path}", remedy).answer()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def crashed(request: Request, error: Exception) -> JSONResponse:
        log.error("http_request_failed", path=request.url.path, error=repr(error), exc_info=error)
        return Problem(500, "internal error", "The log of the metrics service says more.").answer()
