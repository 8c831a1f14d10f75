"""Calls that change something on every worker: an abort, and a flush of the prefix caches.

    POST /abort_request       {"rid": ...} to every worker that may hold it; {"abort_all": true} needs the token
    GET, POST /flush_cache    to every worker; 200 when each has flushed

A worker that fails is told in the answer.
"""

from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from services.router.control.bodies import body_of, parse, read_body
from services.router.control.fan_out import FanOut
from services.router.control.gate import CHALLENGE, NEED_TOKEN, NO_TOKEN_SET
from services.router.control.refusals import Refusal, answers
from services.router.control.schemas import AbortBody, Aborted, Flushed
from services.router.control.whom import every_worker, key_for_engines
from services.router.router import Router

ABORT_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 30.0
MAX_FLUSH_WAIT_S = 600.0
ABORT_EXAMPLE = '{"rid": "my-request"}'
JSON = (b"content-type", b"application/json")

FlushWait = Annotated[float, Query(ge=0, le=MAX_FLUSH_WAIT_S, allow_inf_nan=False)]


def abort_routes(router: Router, fan_out: FanOut) -> APIRouter:
    """The route that aborts."""
    routes = APIRouter()

    @routes.post(
        "/abort_request",
        response_model=Aborted,
        responses=answers(400, 401, 403, 413, 502, 503),
        openapi_extra=body_of(AbortBody),
    )
    async def abort_request(request: Request) -> Response:
        """End a request, wherever it is."""
        body = await read_body(request, router.settings.max_control_body_bytes)
        asked = parse(AbortBody, body, example=ABORT_EXAMPLE)
        if asked.abort_all:
            _check_abort_all(router, request)
        elif not asked.rid:
            raise Refusal(400, "bad_request", f"rid must name the request to abort. Example: {ABORT_EXAMPLE}")
        sent = {"abort_all": True} if asked.abort_all else {"rid": asked.rid}
        said = await fan_out.change(
            every_worker(router),
            "POST",
            "/abort_request",
            timeout_s=ABORT_TIMEOUT_S,
            body=orjson.dumps(sent),
            headers=[JSON, *key_for_engines(router, request)],
        )
        content = {"rid": asked.rid, "workers": {told.url: told.status or told.error for told in said}}
        done = all(told.good for told in said) if asked.abort_all else any(told.good for told in said)
        if not done:
            message = f"{'not every' if asked.abort_all else 'no'} worker took the abort"
            raise Refusal(502, "abort_failed", message, more=content)
        return JSONResponse(content)

    return routes


def flush_routes(router: Router, fan_out: FanOut) -> APIRouter:
    """The route that flushes."""
    routes = APIRouter()

    async def flush_cache(request: Request, timeout: FlushWait = 0.0) -> Response:
        """Flush the prefix cache of every worker. timeout: seconds that each waits until it is idle."""
        target = f"/flush_cache?timeout={timeout:g}" if timeout else "/flush_cache"
        workers = every_worker(router)
        headers = key_for_engines(router, request)
        said = await fan_out.change(
            workers, request.method, target, timeout_s=FLUSH_TIMEOUT_S + timeout, headers=headers
        )
        failed = [[told.url, told.problem] for told in said if not told.good]
        content = {
            "successful": [told.url for told in said if told.good],
            "failed": failed,
            "total_workers": len(said),
            "http_workers": len(said),
        }
        if failed:
            status = 400 if all(400 <= told.status < 500 or told.good for told in said) else 502
            message = f"Flush cache failed on {len(failed)} of {len(said)} workers"
            raise Refusal(status, "flush_failed", message, more=content)
        return JSONResponse({"message": f"Cache flushed on {len(said)} workers", **content})

    for method in ("GET", "POST"):
        routes.add_api_route(
            "/flush_cache",
            flush_cache,
            methods=[method],
            response_model=Flushed,
            responses=answers(400, 401, 403, 502, 503),
            operation_id=f"flush_cache_{method.lower()}",
        )
    return routes


def _check_abort_all(router: Router, request: Request) -> None:
    if not router.token.needed:
        raise Refusal(403, "admin_path_refused", f"abort_all {NO_TOKEN_SET}; abort by rid")
    if not router.token.allows(request.scope["headers"]):
        challenge = {name.decode(): value.decode() for name, value in CHALLENGE}
        raise Refusal(401, "unauthorized", NEED_TOKEN, headers=challenge)
