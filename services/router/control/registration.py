"""Workers in and out over HTTP, in the words of sgl-router: today's `/workers`, and the calls it had before 0.2.2.

    POST   /workers {"url": ...}          register; registering again starts the worker's registration anew
    GET    /workers, /workers/ID          what is registered
    DELETE /workers/ID or /workers/URL    take out (the URL with its characters escaped or not)
    POST   /add_worker, /remove_worker    the same with url in the query or the body
    GET    /list_workers                  {"urls": [...]}

A worker registered here needs no policy version to be confirmed: it takes requests once a health probe was answered.
"""

import structlog
from fastapi import APIRouter, Request

from services.router.control.bodies import Model, body_of, parse, read_body, read_object, validated
from services.router.control.refusals import Refusal, answers
from services.router.control.schemas import (
    RegisteredWorker,
    RegisterWorker,
    RemovedWorker,
    UrlList,
    WorkerList,
    WorkerUrlBody,
    WorkerView,
)
from services.router.router import Router
from services.router.workers.urls import BadUrl, BadWorker
from services.router.workers.worker import Worker
from services.router.workers.workers import TooManyWorkers

log = structlog.get_logger()

EXAMPLE = '{"url": "http://127.0.0.1:30000"}'
URL_IN_QUERY = {
    "parameters": [
        {"name": "url", "in": "query", "required": True, "schema": {"type": "string", "format": "worker-url"}}
    ]
}


def worker_routes(router: Router) -> APIRouter:
    """The routes of today's API."""
    routes = APIRouter()

    @routes.post(
        "/workers",
        status_code=202,
        response_model=RegisteredWorker,
        responses=answers(400, 401, 403, 413, 429),
        openapi_extra=body_of(RegisterWorker),
    )
    async def register_worker(request: Request) -> RegisteredWorker:
        """Register a worker, or start the registration of a known address anew."""
        return await _register(router, await _asked(RegisterWorker, request, router))

    @routes.get("/workers", responses=answers(401))
    async def list_workers() -> WorkerList:
        """All workers."""
        return WorkerList.of(router.workers.all())

    @routes.get("/workers/{name:path}", responses=answers(401, 404))
    async def get_worker(name: str) -> WorkerView:
        """One worker, by id or address."""
        return WorkerView.of(_find(router, name))

    @routes.delete("/workers/{name:path}", status_code=202, responses=answers(401, 403, 404))
    async def remove_worker(name: str) -> RemovedWorker:
        """Take a worker out; requests in flight end in peace."""
        worker = _find(router, name)
        await _remove(router, name)
        return RemovedWorker(
            worker_id=name if name == worker.worker_id else str(worker.url),
            id=worker.worker_id,
            url=str(worker.url),
            in_flight=worker.in_flight,
            urls=_urls(router).urls,
            message="taken out; requests in flight end in peace",
        )

    return routes


def old_routes(router: Router) -> APIRouter:
    """The routes of sgl-router before 0.2.2."""
    routes = APIRouter()

    @routes.post("/add_worker", responses=answers(400, 401, 403, 413, 429), openapi_extra=URL_IN_QUERY)
    async def add_worker(request: Request) -> RegisteredWorker:
        """Register a worker. A JSON body, as of POST /workers, may stand in the place of the query."""
        return await _register(router, await _asked(RegisterWorker, request, router, or_query=True))

    @routes.post("/remove_worker", responses=answers(400, 401, 403, 404, 413), openapi_extra=URL_IN_QUERY)
    async def remove_worker(request: Request) -> UrlList:
        """Take a worker out. A JSON body with its url may stand in the place of the query."""
        asked = await _asked(WorkerUrlBody, request, router, or_query=True)
        _find(router, asked.url)
        await _remove(router, asked.url)
        return _urls(router)

    @routes.get("/list_workers", responses=answers(401))
    async def list_workers() -> UrlList:
        """The addresses of registered workers."""
        return _urls(router)

    return routes


async def _asked(model: type[Model], request: Request, router: Router, *, or_query: bool = False) -> Model:
    """What the body asks. or_query: the url may stand in the query, and then wins. Raises Refusal."""
    body = await read_body(request, router.settings.max_control_body_bytes)
    query = request.query_params
    url = (query.get("url") or query.get("worker_url")) if or_query else None
    if url is None:
        return parse(model, body, example=EXAMPLE)
    said = read_object(body, example=EXAMPLE) if body else {}
    return validated(model, {**said, "url": url})


async def _register(router: Router, asked: RegisterWorker) -> RegisteredWorker:
    """Register, and answer once every process of the router acts on it. Raises Refusal."""
    try:
        worker = router.add(
            asked.url,
            admit=True,
            worker_type=asked.worker_type,
            labels=asked.labels,
            priority=asked.priority,
            api_key=asked.api_key,
        )
    except BadUrl as error:
        raise Refusal(400, "bad_url", str(error)) from error
    except BadWorker as error:
        raise Refusal(400, "bad_request", str(error)) from error
    except TooManyWorkers as error:
        raise Refusal(429, "too_many_workers", str(error)) from error
    await router.settled()
    return RegisteredWorker.of(worker)


async def _remove(router: Router, name: str) -> None:
    router.remove(name)
    await router.settled()


def _find(router: Router, name: str) -> Worker:
    """A registered worker, or one that is leaving, by id or address. Raises Refusal."""
    worker = router.workers.find(name)
    if worker is None:
        message = f"no worker has the id or address {name[:200]!r}. GET /workers lists them."
        raise Refusal(404, "unknown_worker", message)
    return worker


def _urls(router: Router) -> UrlList:
    return UrlList(urls=[str(worker.url) for worker in router.workers.all() if not worker.removed])
