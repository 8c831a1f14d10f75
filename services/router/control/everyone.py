"""Paths of an engine that mean all engines here: each answers in the shape that clients of one engine read.

    POST /abort_request       {"rid": ...} to every worker that may hold it; {"abort_all": true} needs the token
    GET, POST /flush_cache    to every worker; 200 when each has flushed
    GET /v1/models            the models of ready workers, each id once
    GET /v1/loads             loads of every worker, each marked with its worker; the query goes to each
    GET /get_load, /get_loads the same in the words of older engines, and of sgl-router
    GET /engine_metrics       Prometheus text of every worker, each sample labelled worker="URL"

A worker that fails is told in the answer.
"""

import asyncio
import datetime
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from services.router.control import exposition, joins
from services.router.control.bodies import body_of, parse, read_body
from services.router.control.fan_out import FanOut, Headers, Told
from services.router.control.gate import CHALLENGE, NEED_TOKEN, NO_TOKEN_SET
from services.router.control.refusals import Refusal, answers, unavailable
from services.router.control.schemas import (
    AbortBody,
    Aborted,
    Flushed,
    Loads,
    ModelList,
    OldLoad,
    WorkerLoad,
    WorkerLoads,
)
from services.router.control.token import AUTHORIZATION
from services.router.router import Router
from services.router.workers.worker import State, Worker

ABORT_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 30.0
MAX_FLUSH_WAIT_S = 600.0
ABORT_EXAMPLE = '{"rid": "my-request"}'
JSON = (b"content-type", b"application/json")
TEXT = "text/plain; version=0.0.4; charset=utf-8"

FlushWait = Annotated[float, Query(ge=0, le=MAX_FLUSH_WAIT_S, allow_inf_nan=False)]


def change_routes(router: Router, fan_out: FanOut) -> APIRouter:
    """The routes that change something."""
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
            _everyone(router),
            "POST",
            "/abort_request",
            timeout_s=ABORT_TIMEOUT_S,
            body=orjson.dumps(sent),
            headers=[JSON, *_key(router, request)],
        )
        content = {"rid": asked.rid, "workers": {told.url: told.status or told.error for told in said}}
        done = all(told.good for told in said) if asked.abort_all else any(told.good for told in said)
        if not done:
            message = f"{'not every' if asked.abort_all else 'no'} worker took the abort"
            raise Refusal(502, "abort_failed", message, more=content)
        return JSONResponse(content)

    async def flush_cache(request: Request, timeout: FlushWait = 0.0) -> Response:
        """Flush the prefix cache of every worker. timeout: seconds that each waits until it is idle."""
        target = f"/flush_cache?timeout={timeout:g}" if timeout else "/flush_cache"
        workers = _everyone(router)
        headers = _key(router, request)
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


def read_routes(router: Router, fan_out: FanOut) -> APIRouter:
    """The routes that only look."""
    routes = APIRouter()

    @routes.get("/v1/models", response_model=ModelList, responses=answers(502, 503))
    async def list_models(request: Request) -> Response:
        """The models of ready workers."""
        ready = [worker for worker in router.workers.all() if worker.state is State.READY]
        if not ready:
            raise unavailable(router.settings, "no_ready_worker", "no worker is ready")
        said = await fan_out.read(ready, "/v1/models", headers=_key(router, request))
        models, problems = joins.join_models(_good(said))
        problems = {**_problems(said), **problems}
        if len(problems) == len(said):
            raise Refusal(502, "workers_failed", "no worker told its models", more={"errors": problems})
        return JSONResponse({"object": "list", "data": models, **({"errors": problems} if problems else {})})

    @routes.get("/v1/loads", response_model=Loads, responses=answers(502, 503))
    async def loads(request: Request) -> Response:
        """The loads of every worker. The query goes to each."""
        query = request.scope["query_string"].decode("latin-1")
        target = f"/v1/loads?{query}" if query else "/v1/loads"
        said = await fan_out.read(_everyone(router), target, headers=_key(router, request))
        if any(_is_text(told) for told in said):
            return await _joined_text(said)
        joined, problems = joins.join_loads(_good(said))
        problems = {**_problems(said), **problems}
        if len(problems) == len(said):
            raise Refusal(502, "workers_failed", "no worker told its load", more={"errors": problems})
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return JSONResponse({**joined, "timestamp": now, **({"errors": problems} if problems else {})})

    @routes.get("/get_load", response_model=list[OldLoad], responses=answers(502, 503))
    async def get_load(request: Request) -> Response:
        """The loads of every worker, in the words of engines before /v1/loads."""
        ranks = await _old_loads(fan_out, _everyone(router), _key(router, request))
        if all(found is None for found in ranks.values()):
            raise Refusal(502, "workers_failed", "no worker told its load")
        return JSONResponse([load for found in ranks.values() for load in found or ()])

    @routes.get("/get_loads", responses=answers(503))
    async def get_loads(request: Request) -> WorkerLoads:
        """Requests that run or wait at each worker, in the words of sgl-router."""
        workers = _everyone(router)
        ranks = await _old_loads(fan_out, workers, _key(router, request))
        listed = [
            WorkerLoad(
                worker=str(worker.url),
                worker_type=worker.worker_type,
                load=-1 if (found := ranks[worker]) is None else joins.num_requests(found),
            )
            for worker in workers
        ]
        failed = sum(load.load < 0 for load in listed)
        return WorkerLoads(
            workers=listed, loads=listed, total_workers=len(listed), successful=len(listed) - failed, failed=failed
        )

    @routes.get("/engine_metrics", response_class=Response, responses={200: {"content": {TEXT: {}}}, **answers(503)})
    async def engine_metrics(request: Request) -> Response:
        """Prometheus text of every worker."""
        headers = _key(router, request)
        return await _joined_text(await fan_out.read(router.workers.everyone(), "/metrics", headers=headers))

    return routes


def _everyone(router: Router) -> list[Worker]:
    """Every worker that may be answering something. Raises Refusal."""
    workers = router.workers.everyone()
    if not workers:
        raise unavailable(router.settings, "no_ready_worker", "no worker is registered")
    return workers


def _check_abort_all(router: Router, request: Request) -> None:
    if not router.token.needed:
        raise Refusal(403, "admin_path_refused", f"abort_all {NO_TOKEN_SET}; abort by rid")
    if not router.token.allows(request.scope["headers"]):
        challenge = {name.decode(): value.decode() for name, value in CHALLENGE}
        raise Refusal(401, "unauthorized", NEED_TOKEN, headers=challenge)


def _key(router: Router, request: Request) -> Headers:
    """The client's own key for the engines, as it goes with a generation. Never the router's token."""
    sent = [pair for pair in request.scope["headers"] if pair[0] == AUTHORIZATION]
    return router.token.without(sent)


async def _old_loads(
    fan_out: FanOut, workers: Sequence[Worker], headers: Headers
) -> dict[Worker, list[dict[str, Any]] | None]:
    """Loads by worker; None: it did not say. Engines have either the one path or the other."""
    said = await fan_out.read(workers, "/v1/loads?include=core", headers=headers)
    without = [told.worker for told in said if told.status in (404, 405)]
    older = {told.worker: told for told in await fan_out.read(without, "/get_load", headers=headers)} if without else {}
    best = [older.get(told.worker, told) for told in said]
    return {told.worker: joins.old_loads(told.url, told.body) if told.good else None for told in best}


def _good(said: Sequence[Told]) -> list[tuple[str, bytes]]:
    return [(told.url, told.body) for told in said if told.good]


def _problems(said: Sequence[Told]) -> dict[str, str]:
    return {told.url: told.problem for told in said if not told.good}


def _is_text(told: Told) -> bool:
    headers = told.answer.headers if told.answer is not None else ()
    return told.good and any(name == b"content-type" and value.startswith(b"text/plain") for name, value in headers)


async def _joined_text(said: Sequence[Told]) -> Response:
    """In a thread: the text of many engines takes time that requests should not wait for."""
    texts = {told.url: told.body.decode("utf-8", "replace") for told in said if told.good}
    down = [told.url for told in said if not told.good]
    return Response(await asyncio.to_thread(exposition.join, texts, down=down), media_type=TEXT)
