"""Paths of an engine that only look, answered for all engines in the shape that clients of one engine read.

    GET /v1/models            the models of ready workers, each id once
    GET /v1/loads             loads of every worker, each marked with its worker; the query goes to each
    GET /get_load, /get_loads the same in the words of older engines, and of sgl-router
    GET /engine_metrics       Prometheus text of every worker, each sample labelled worker="URL"

A worker that fails is told in the answer.
"""

import asyncio
import datetime
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from services.router.control import exposition, joins
from services.router.control.fan_out import FanOut, Headers, Told
from services.router.control.refusals import Refusal, answers, unavailable
from services.router.control.schemas import Loads, ModelList, OldLoad, WorkerLoad, WorkerLoads
from services.router.control.whom import every_worker, key_for_engines
from services.router.router import Router
from services.router.workers.worker import State, Worker

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def model_routes(router: Router, fan_out: FanOut) -> APIRouter:
    """The route that tells the models."""
    routes = APIRouter()

    @routes.get("/v1/models", response_model=ModelList, responses=answers(502, 503))
    async def list_models(request: Request) -> Response:
        """The models of ready workers."""
        ready = [worker for worker in router.workers.all() if worker.state is State.READY]
        if not ready:
            raise unavailable(router.settings, "no_ready_worker", "no worker is ready")
        said = await fan_out.read(ready, "/v1/models", headers=key_for_engines(router, request))
        models, problems = joins.join_models(_good(said))
        problems = {**_problems(said), **problems}
        if len(problems) == len(said):
            raise Refusal(502, "workers_failed", "no worker told its models", more={"errors": problems})
        return JSONResponse({"object": "list", "data": models, **({"errors": problems} if problems else {})})

    return routes


def load_routes(router: Router, fan_out: FanOut) -> APIRouter:
    """The routes that tell how much there is to do."""
    routes = APIRouter()

    @routes.get("/v1/loads", response_model=Loads, responses=answers(502, 503))
    async def loads(request: Request) -> Response:
        """The loads of every worker. The query goes to each."""
        query = request.scope["query_string"].decode("latin-1")
        target = f"/v1/loads?{query}" if query else "/v1/loads"
        said = await fan_out.read(every_worker(router), target, headers=key_for_engines(router, request))
        if any(_is_text(told) for told in said):
            return await _joined_text(said)
        joined, problems = joins.join_loads(_good(said))
        problems = {**_problems(said), **problems}
        if len(problems) == len(said):
            raise Refusal(502, "workers_failed", "no worker told its load", more={"errors": problems})
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return JSONResponse({**joined, "timestamp": now, **({"errors": problems} if problems else {})})

    return routes


def old_load_routes(router: Router, fan_out: FanOut) -> APIRouter:
    """The same in the words of older engines, and of sgl-router."""
    routes = APIRouter()

    @routes.get("/get_load", response_model=list[OldLoad], responses=answers(502, 503))
    async def get_load(request: Request) -> Response:
        """The loads of every worker, in the words of engines before /v1/loads."""
        ranks = await _old_loads(fan_out, every_worker(router), key_for_engines(router, request))
        if all(found is None for found in ranks.values()):
            raise Refusal(502, "workers_failed", "no worker told its load")
        return JSONResponse([load for found in ranks.values() for load in found or ()])

    @routes.get("/get_loads", responses=answers(503))
    async def get_loads(request: Request) -> WorkerLoads:
        """Requests that run or wait at each worker, in the words of sgl-router."""
        workers = every_worker(router)
        ranks = await _old_loads(fan_out, workers, key_for_engines(router, request))
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

    return routes


def metric_routes(router: Router, fan_out: FanOut) -> APIRouter:
    """The route that joins the engines' metrics."""
    routes = APIRouter()

    @routes.get("/engine_metrics", response_class=Response, responses={200: {"content": {TEXT: {}}}, **answers(503)})
    async def engine_metrics(request: Request) -> Response:
        """Prometheus text of every worker."""
        headers = key_for_engines(router, request)
        return await _joined_text(await fan_out.read(router.workers.everyone(), "/metrics", headers=headers))

    return routes


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
